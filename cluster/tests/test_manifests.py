"""python -m cluster print: bash parses what it prints, its YAML fits the projects it is for, each argument arrives.

gcloud, xpk, kubectl and docker are functions of a bash that note how they were called.
"""

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys

import jsonschema
import pytest
import yaml
from processes import ROOT
from test_docs import commands_of
from test_tpu_vm_page import on_the_vm

from cluster import manifests, pods
from cluster.slices import RENTED, SHAPES_2D, ZONES, check_image, find_slice, slice_names
from tpu_utils.base.hardware import GENERATIONS

IMAGE = "us-docker.pkg.dev/my-project/r/tpu-examples:1"
ON_GKE = ["--slice", "v5litepod-16", "--zone", "us-west4-a", "--image", IMAGE]
ASKED = {"queued-resource": ON_GKE[:4], "xpk": ON_GKE, "jobset": ON_GKE, "kuberay": ON_GKE}
SCRIPT = ["--", "transformer_tpu.py", "--preset", "distributed", "--run_dir", "gs://b/runs/x", "--resume", "auto"]
SCHEMAS = json.loads((ROOT / "cluster" / "tests" / "cluster_schemas.json").read_text())


def printed(*arguments: str) -> tuple[int, str, str]:
    """(exit code, text, messages)."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", newline=""), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = manifests.main(list(arguments))
    out.flush()
    return code, out.buffer.getvalue().decode(), err.getvalue()


def text_of(kind: str, *options: str, script=SCRIPT) -> str:
    code, text, err = printed(kind, *ASKED[kind], *options, *script)
    assert code == 0, err
    return text


def yaml_of(text: str) -> dict:
    (found,) = re.findall(r"<<'END_OF_YAML'\n(.*?)\nEND_OF_YAML\n", text, re.S)
    return yaml.safe_load(found)


def calls_of(text: str, folder) -> list[list[str]]:
    """Every call that a bash with this text makes, in their order."""
    note = 'printf "%s\\0" "$#" "$name" "$@" >> calls'
    names = ("gcloud", "kubectl", "xpk", "docker", "python", "ssh-agent", "ssh-add", "base64")
    functions = "".join(f"{name}() {{ local name={name}; {note}; }}\n" for name in names)
    (folder / "calls").unlink(missing_ok=True)
    done = subprocess.run(["bash", "-eu"], input=f"{functions}{text}\nwait\n".encode(), cwd=folder, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    found, calls = (folder / "calls").read_bytes().decode().split("\0")[:-1], []
    while found:
        count = int(found[0]) + 2
        calls, found = [*calls, found[1:count]], found[count:]
    return calls


# ------------------------------------------------------------------------------------------------ the arguments arrive
AWKWARD = ["$(HOME)", "$$", "$$(A)", "`id`", "'", '"', "a b", "", "\\n", "\n", "\t", "é雪🙂", "~"]
NUMBERS = "1e-3 1e3 0o17 0x1F 1_000 12:30:00 .5 -.inf .NaN no Off y << = true null 2026-01-01".split()
"""No plain words of YAML: one of its versions reads each as something else than a string."""
LINES = [
    [],
    ["".join(AWKWARD), *AWKWARD, *NUMBERS],
    [chr(code) + after for code in range(1, 256) for after in ("", "b1")],
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home folder of a VM, and a container's: python notes its words."""
    folder = tmp_path_factory.mktemp("home")
    for place in ("tpu-examples/.venv/bin", "bin"):
        (folder / place).mkdir(parents=True)
        python = folder / place / "python"
        python.write_text(
            f'#!/bin/bash\nprintf "%s\\0" "$@" > {folder}/words.part; mv {folder}/words.part {folder}/words\n'
        )
        python.chmod(0o755)
    return folder


def words_of(command: str, home) -> list[str]:
    (home / "words").unlink(missing_ok=True)
    environment = {"PATH": f"{home}/bin:{os.environ['PATH']}", "LC_ALL": "C"}
    until = f"until [ -e {home}/words ]; do sleep 0.01; done"
    done = subprocess.run(
        ["bash", "-c", f"{command}\n{until}"], cwd=home, env=environment, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    return (home / "words").read_bytes().decode().split("\0")[:-1]


def by_kubernetes(word: str) -> str:
    """What a container without variables gets (expansion.go, Expand): $$ is $, a $(NAME) that nobody set stays."""
    return word.replace("$$", "$")


def words_that_arrive(kind: str, text: str, home) -> list[str]:
    """What the python of a host, or the cluster's command line, is given."""
    if kind == "jobset":
        (pod,) = pods_of(yaml_of(text))
        return [by_kubernetes(word) for word in pod["containers"][0]["command"]][1:]
    calls = calls_of(text, home)
    if kind == "queued-resource":  # through two shells: the reader's, and that of ssh
        (start,) = [call[-1] for call in calls if "ssh" in call and "nohup" in call[-1]]
        return words_of(start.removeprefix("--command="), home)
    if kind == "xpk":  # the reader's shell, a literal block of YAML, Kubernetes and the container's shell
        command = line_of(calls, "xpk", "workload", "create")[-1].removeprefix("--command=")
        block = f"command:\n- bash\n- -c\n- |\n  echo start;\n  ({command}) & PID=$!;\n  wait $PID;\n"
        return words_of(by_kubernetes(yaml.safe_load(block)["command"][2]), home)
    script, *words = line_of(calls, "python", "-m", "cluster", "run")[4:]
    own = ["--slice", "v5litepod-16", "--name", "aot-tpu", "--plain", "--detach", "--"]
    assert words[: len(own)] == own
    return [script, *words[len(own) :]]


def line_of(calls: list, *start: str) -> list[str]:
    (call,) = [call for call in calls if call[: len(start)] == list(start)]
    return call


@pytest.mark.parametrize("kind", manifests.PRINTERS)
def test_the_script_gets_every_argument_as_it_was_given(kind, home):
    for line in LINES:
        text = text_of(kind, script=["--", "aot_tpu.py", *line])
        assert words_that_arrive(kind, text, home) == ["aot_tpu.py", *line]


def test_what_another_yaml_takes_for_a_number_is_quoted():
    """PyYAML, which reads it back above, takes 1e-3 for a string; the parser of Kubernetes does not."""
    text = text_of("jobset", script=["--", "aot_tpu.py", *NUMBERS])
    assert [word for word in NUMBERS if f'- "{word}"\n' not in text] == []


# ------------------------------------------------------------------------------------------------ it fits together
def zone_of(generation: str) -> str:
    return ZONES[generation][0]


OPTIONS = [[], ["--spot", "--num_slices", "3"], ["--project", "my-project"]]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "".join(options[:1]))
@pytest.mark.parametrize("kind", manifests.PRINTERS)
def test_bash_understands_it_and_what_is_created_is_deleted(kind, options, tmp_path):
    text = text_of(kind, *options)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    calls = calls_of(text, tmp_path)
    for verb in ("create", "delete"):
        assert any(verb in call for call in calls)

    def named(verb: str) -> list[tuple]:
        """What gcloud and xpk do it to: the words beside the verb up to the first option, and the cluster."""
        found = []
        for call in (call for call in calls if verb in call and call[0] in ("gcloud", "xpk")):
            words = itertools.takewhile(lambda word: not word.startswith("--"), call)
            words = [word for word in words if word not in (verb, "workload-policy")]
            found.append((*words, *after(call, "--cluster")))
        return sorted(found)

    assert named("create") == named("delete") != []
    for call in calls:
        cloud = call[0] in ("gcloud", "xpk")
        assert not cloud or {"us-west4-a", "us-west4"} & set(call), f"nothing is left to gcloud's settings: {call}"
        if cloud and "--project" in options:
            assert after(call, "--project") == ["my-project"], call


def after(call: list[str], option: str) -> list[str]:
    return [call[call.index(option) + 1]] if option in call else []


@pytest.mark.parametrize("kind, schema", [("jobset", "JobSet"), ("kuberay", "RayCluster")])
@pytest.mark.parametrize("options", [*OPTIONS, ["--service_account", "trainer", "--project", "my-project"]])
def test_its_yaml_fits_the_project_it_is_for(kind, schema, options):
    content = yaml_of(text_of(kind, *options))
    fits = jsonschema.Draft202012Validator(SCHEMAS[schema] | {"$defs": SCHEMAS["$defs"]}).validate
    fits(content)
    (pod,) = pods_of(content)
    spot = pod["nodeSelector"].get("cloud.google.com/gke-spot")
    assert (spot == "true") == ("--spot" in options)
    assert pod.get("serviceAccountName") == ("trainer" if "--service_account" in options else None)
    pod["nodeSelectr"] = {}
    with pytest.raises(jsonschema.ValidationError, match="nodeSelectr"):
        fits(content)


def pods_of(content: dict) -> list[dict]:
    """The specifications of pods that have chips."""
    if content["kind"] == "JobSet":
        return [job["template"]["spec"]["template"]["spec"] for job in content["spec"]["replicatedJobs"]]
    return [group["template"]["spec"] for group in content["spec"]["workerGroupSpecs"]]


@pytest.mark.parametrize("name", slice_names())
def test_hosts_chips_machines_and_shapes_agree(name):
    found = find_slice(name, by_xpk=False)
    generation = found.topology.generation
    assert found.accelerator_type == name and found.hosts * found.chips_per_host == found.chips
    asked = ["--slice", name, "--zone", zone_of(generation), "--image", IMAGE, "--num_slices", "2", *SCRIPT]
    text = printed("jobset", *asked)[1]
    content = yaml_of(text)
    (pod,) = pods_of(content)
    lines = text.replace("\\\n", " ").splitlines()
    pools = [shlex.split(line) for line in lines if line.startswith("gcloud container node-pools create")]
    nodes = sum(int(after(call, "--num-nodes")[0]) for call in pools)
    assert nodes == 2 * found.hosts and len(pools) == (2 if found.hosts > 1 else 1)
    assert content["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] == found.hosts
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": found.chips_per_host}
    assert {after(call, "--machine-type")[0] for call in pools} == {found.machine}
    assert found.machine.endswith(f"-{found.chips_per_host}t")
    selector = pod["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-topology"] == found.shape
    assert selector["cloud.google.com/gke-tpu-accelerator"] == RENTED[generation].label
    for call in pools:
        assert after(call, "--tpu-topology") == ([found.shape] if found.hosts > 1 and generation != "TPU7x" else [])
    workers = yaml_of(printed("kuberay", *asked)[1])["spec"]["workerGroupSpecs"][0]
    assert (workers["numOfHosts"], workers["replicas"]) == (found.hosts, 2)


def test_the_machines_that_others_name():
    """What GKE's documentation and docs/colab_kaggle_gke.md say of each."""
    machines = {name: (find_slice(name, False).machine, find_slice(name, False).hosts) for name in slice_names()}
    assert machines["v5litepod-1"] == ("ct5lp-hightpu-1t", 1) and machines["v5litepod-8"] == ("ct5lp-hightpu-8t", 1)
    assert machines["v5litepod-16"] == ("ct5lp-hightpu-4t", 4) and machines["v6e-256"] == ("ct6e-standard-4t", 64)
    assert machines["v4-8"] == ("ct4p-hightpu-4t", 1) and machines["v5p-8192"] == ("ct5p-hightpu-4t", 1024)
    assert machines["tpu7x-128"] == ("tpu7x-standard-4t", 16)
    by_xpk = find_slice("v6e-8", by_xpk=True)
    assert (by_xpk.machine, by_xpk.hosts, by_xpk.xpk_type) == ("ct6e-standard-4t", 2, "v6e-2x4")
    assert RENTED.keys() == ZONES.keys() == GENERATIONS.keys() and 8 in SHAPES_2D


def test_the_pages_and_the_requirements_say_the_same():
    """docs/tpu_vm.md has zones and images too, cluster/requirements.txt Ray's version."""
    page = (ROOT / "docs" / "tpu_vm.md").read_text()
    for generation, rented in RENTED.items():
        (row,) = re.findall(rf"^\| {generation} \|.*$", page, re.M)
        assert f"`{rented.version}`" in row or not rented.version
        zones = set(re.findall(r"us-[a-z0-9-]+", row))
        assert zones == {zone for zone in ZONES[generation] if "ai" not in zone}
    assert f"ray[default]=={pods.RAY}" in (ROOT / "cluster" / "requirements.txt").read_text()


def test_it_says_what_the_other_pages_say(tmp_path):
    """docs/tpu_vm.md: the setup and the doctor. docs/colab_kaggle_gke.md: the JobSet and its nodes."""
    calls = [call for call in calls_of(text_of("queued-resource"), tmp_path) if "ssh" in call]
    sent = [call[-1].removeprefix("--command=").split() for call in calls]
    for word in ("apt-get", "setup_tpu.py --device tpu"):
        assert on_the_vm(word).split() in sent
    page = (ROOT / "docs" / "colab_kaggle_gke.md").read_text()
    (block,) = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.S) if "kind: JobSet" in block]
    theirs = yaml.safe_load(block)
    (pod,) = pods_of(theirs)
    container = pod["containers"][0]
    words, image = [*container["command"], *container.pop("args")][1:], container["image"]
    container["command"] = ["python", *words]
    options = ["--name", "mnist", "--service_account", "trainer", "--project", "my-project"]
    text = text_of("jobset", *options, script=["--", *words])
    ours = yaml_of(text)
    pods_of(ours)[0]["containers"][0]["image"] = image
    assert ours == theirs
    (pool,) = [call for call in calls_of(text, tmp_path) if call[1:4] == ["container", "node-pools", "create"]]
    (line,) = [shlex.split(text) for text, _ in commands_of(ROOT / "docs" / "colab_kaggle_gke.md") if "4x4" in text]
    for option in ("--machine-type", "--tpu-topology", "--num-nodes", "--location", "--node-locations"):
        assert after(pool, option) == after(line, option)


def test_a_slice_by_its_shape_or_another_name_is_the_same_slice():
    names = ("v5e:4x4", "V5E-16", "v5litepod-16")
    texts = {printed("jobset", "--slice", name, *ON_GKE[2:], *SCRIPT)[1] for name in names}
    assert len(texts) == 1
    assert text_of("jobset") == text_of("jobset", script=["--", "./transformer_tpu.py", *SCRIPT[2:]])
    dashes = printed("jobset", *ON_GKE, "--num-slices=2", "--any-zone", *SCRIPT)
    assert dashes == printed("jobset", *ON_GKE, "--num_slices", "2", "--any_zone", *SCRIPT) and dashes[0] == 0


# ------------------------------------------------------------------------------------------------ what is refused
MISTAKES = [
    (["jobst", *ON_GKE], "did you mean jobset?"),
    (["jobset", "--slce", "x"], "unknown option '--slce'; did you mean --slice?"),
    (["jobset"], "required: --slice, --zone"),
    (["jobset", "--slice=v3-8", *ON_GKE[2:]], "tpu7x-8, v5e:4x4; did you mean"),
    (["jobset", *ON_GKE, "transformer_tpu.py"], "one word too many before --"),
    (["jobset", "--slice", "v5lite-16", *ON_GKE[2:]], "did you mean v5litepod-16?"),
    (["jobset", "--slice", "v5litepod-9", *ON_GKE[2:]], "nearest is v5litepod-8"),
    (["jobset", "--slice", "2xv5litepod-16", *ON_GKE[2:]], "expected --slice v5litepod-16 --num_slices 2"),
    (["xpk", "--slice", "v5litepod-4", *ON_GKE[2:]], "choose v5litepod-8"),
    (["jobset", *ON_GKE[:2], "--zone", "us-west4", *ON_GKE[4:]], "is a region; a zone ends in a letter"),
    (["jobset", *ON_GKE[:2], "--zone", "us-wset4-a", *ON_GKE[4:]], "did you mean us-west4-a?"),
    (["jobset", *ON_GKE[:2], "--zone", "us-east5-b", *ON_GKE[4:]], "not known to have v5e; zones of the US with v5e"),
    (["jobset", *ON_GKE[:2], "--zone", "; rm -rf x", *ON_GKE[4:]], "is no zone"),
    (["jobset", *ON_GKE[:4]], "jobset runs a container image; add --image"),
    (["jobset", *ON_GKE[:4], "--image", "US.io/P/x"], "no reference to an image"),
    (["jobset", *ON_GKE[:4], "--image", "us-docker.pkg.dev/p/x"], "no image in a repository"),
    (["queued-resource", *ON_GKE], "--image has no effect on queued-resource"),
    (["jobset", *ON_GKE, "--runtime_version", "v2-alpha-tpuv6e"], "--runtime_version has no effect on jobset"),
    (["queued-resource", *ON_GKE[:4], "--runtime_version", "v2-alpha-tpuv6e"], "is for v6e, the slice is v5e"),
    (["queued-resource", "--slice", "tpu7x-8", "--zone", "us-central1-c"], "print xpk, jobset or kuberay"),
    (["xpk", *ON_GKE, "--service_account", "a"], "no effect on xpk"),
    (["jobset", *ON_GKE, "--service_account", "a"], "add --project"),
    (["queued-resource", *ON_GKE[:4], "--service_account", "a"], "NAME@PROJECT.iam.gserviceaccount.com"),
    (["queued-resource", *ON_GKE[:4], "--git_url", "a b"], "no address that git can clone"),
    (["jobset", *ON_GKE, "--name", "My_Run"], "try my-run"),
    (["jobset", *ON_GKE, "--name", "x" * 36], "at most 35"),
    (["jobset", *ON_GKE, "--name=-"], "cannot be used"),
    (["jobset", *ON_GKE, "--project", "Mine"], "no project's ID"),
    (["jobset", *ON_GKE, "--num_slices", "0"], "expected a number from 1 to 99"),
    (["jobset", *ON_GKE, "--num_slices", "٣"], "expected a number from 1 to 99"),
]


NO_SCRIPTS = [
    ([], "no script to run"),
    (["--"], "no script to run"),
    (["--", "transformr_tpu.py"], "did you mean transformer_tpu.py?"),
    (["transformer_tpu.py", "--preset", "distributed"], "no script to run; expected KIND --slice SLICE"),
    (["--", "python", "transformer_tpu.py"], "leave it out"),
    (["--", "tests/conftest.py"], "is not in the image"),
    (["--", "/etc/x.py"], "expected its path from the project's folder"),
    (["--", "../x.py"], "expected its path from the project's folder"),
    (["--", "transformer_tpu.py", "--num-step", "3"], "has no option '--num-step'; did you mean --num_steps?"),
    (["--", "transformer_tpu.py", "--preset=distribted"], "did you mean distributed?"),
    (["--", "transformer_tpu.py", "--optimizer", "adamm"], "expected one of"),
    (["--", "aot_tpu.py", "\udcff"], "no text in UTF-8"),
]
REFUSED = [([*arguments, *SCRIPT], said) for arguments, said in MISTAKES]
REFUSED += [(["jobset", *ON_GKE, *script], said) for script, said in NO_SCRIPTS]


@pytest.mark.parametrize("arguments, said", REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_does_not_fit_is_refused(arguments, said):
    code, text, err = printed(*arguments)
    assert (code, text) == (2, "") and said in err and err.startswith("error: "), err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--slice", "v5litepod-16", "--zone", "europe-west4-b"], "does not know whether europe-west4-b has v5e"),
        (["--slice", "v6e-8", "--zone", "us-west4-a", "--any_zone"], "does not know whether us-west4-a has v6e"),
        (["--slice", "tpu7x-8", "--zone", "us-central1-c"], "does not compile for TPU7x"),
        (["--slice", "v6e-8", "--zone", "us-east5-a", "--image", "a.b/c"], "has no tag"),
        (["--slice", "v6e-8", "--zone", "us-east5-a", "--image", "c:1"], "docker.io"),
    ],
)
def test_what_is_not_known_is_printed_with_a_warning(arguments, said):
    arguments = arguments if "--image" in arguments else [*arguments, "--image", IMAGE]
    code, text, err = printed("jobset", *arguments, *SCRIPT)
    assert code == 0 and said in text and said in err and f"# warning: {err.removeprefix('warning: ').strip()}" in text


def test_a_run_that_would_be_lost_is_said():
    assert "warning" not in text_of("jobset")
    assert "--run_dir gs://" in printed("jobset", *ON_GKE, "--", "transformer_tpu.py", "--run-dir", "x")[2]
    without_resume = ["--", "transformer_tpu.py", "--run-dir=gs://b/x"]
    assert "--resume auto" in printed("jobset", *ON_GKE, *without_resume)[2]
    assert printed("queued-resource", *ON_GKE[:4], *without_resume)[2] == ""
    storage = text_of("kuberay", script=["--", "transformer_tpu.py"])
    assert "--storage gs://BUCKET/runs --detach --\n" in storage and "warning" not in storage
    assert "--storage" not in text_of("kuberay")
    assert "one chip" in printed("kuberay", *ON_GKE, "--", "simple_mnist_tpu.py")[2]


def test_references_to_images():
    """distribution/reference, its own examples."""
    good = ["a.b/c:1", "localhost:5000/a/b@sha256:" + "0" * 64, "gcr.io/p/a__b-c.d:v1.0_x", IMAGE]
    bad = ["", "a b", "a.b/c\n", "a.b/" + "c" * 256]
    bad += "A/b a//b a.b/c: a.b/c:-x a.b/c@sha256:12 a.b/-c a.b/c:1:2".split()
    assert [check_image(name) for name in good] == [("", "")] * len(good)
    assert all(check_image(name)[0] for name in bad)


def test_python_alone_prints_it():
    """-S: a Python without site-packages."""
    line = [sys.executable, "-S", "-m", "cluster", "print", "jobset", *ON_GKE, *SCRIPT]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "kind: JobSet" in done.stdout


def test_the_page_shows_what_is_printed():
    """cluster/slices.md: its commands are understood, and its excerpts are lines of their answers."""
    page = ROOT / "cluster" / "slices.md"
    commands = [shlex.split(text) for text, _ in commands_of(page)]
    assert {command[4] for command in commands} == set(manifests.PRINTERS) and len(commands) == len(manifests.PRINTERS)
    answers = [printed(*command[4:]) for command in commands]
    assert [code for code, _, _ in answers] == [0] * len(answers)
    assert [err for _, _, err in answers] == [""] * len(answers), "no warning that the page does not show"
    said = "\n".join(text for _, text, _ in answers)
    said += printed("jobset", *ON_GKE[:2], "--zone=us-wset4-a", *ON_GKE[4:], *SCRIPT, "--num-step", "3")[2]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)
    excerpts = [block for language, block in blocks if not language]
    assert len(excerpts) == 2
    for block in excerpts:
        for line in block.splitlines():
            assert f"{line}\n" in said, line
