"""Many people's runs on one cluster, on Ray. The command line is python -m cluster; cluster/README.md says what holds.

deciding   who starts next, and on which chips: plain functions of hosts, runs and quotas; no Ray
turns      the queue: one actor for the cluster, which asks deciding
driver     one run: waits for its turn, starts its processes, starts them again after a fault, ends with their code
host       the process of one host: its folder, its device variables, its output
guard      stands between Ray's worker and the script, so that the script never outlives its place
client     talks to the cluster's head by HTTP: submit, list, logs, stop, top
folder     the working folder: what is uploaded, and how much
admission  asks the TPU compiler whether a step fits before it takes a place in the queue
manifests  the commands and YAML that create a slice; pods writes the YAML, request checks what was asked for,
           slices is the table of machines and zones, quoting carries any word through shells, YAML and Kubernetes

driver, turns, host and guard run on the cluster: they import the standard library, Ray and tpu_utils.
"""
