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
import shutil
import subprocess

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ROOT, run
from test_docs import commands_of
from test_tpu_vm_page import on_the_vm

from cluster import manifests, pods
from cluster.quoting import for_kubernetes, shell_line, shell_word, yaml_text
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


def by_kubernetes(word: str) -> str:
    """What a container without variables gets (expansion.go, Expand): $$ is $, a $(NAME) that nobody set stays."""
    return word.replace("$$", "$")


# ------------------------------------------------------------------------------------------------ text
awkward = st.sampled_from(
    ["$(HOME)", "$$", "$$(A)", "`id`", "'", '"', "a b", "", "\\n", "\n", "\t", "é雪🙂", "1e-3", "~"]
)
awkward_words = st.lists(awkward | st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=6)
few = settings(max_examples=40, derandomize=True, deadline=None, database=None)


@few
@given(awkward_words)
def test_a_shell_reads_every_word_back(line):
    text = shell_line(line)
    assert "\n" not in text, "one line, also in a comment or a literal block of YAML"
    ran = subprocess.run(["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, env={"LC_ALL": "C"})
    assert ran.stdout.decode().split("\0")[:-1] == (line or [""])


CORE = {  # schema of YAML 1.2, which Kubernetes's parsers follow in part: no plain word of ours may be one of these
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
NUMBERS = "1e-3 1e3 0o17 0x1F 1_000 12:30:00 .5 -.inf NaN no Off y << = 2026-01-01".split()


leaves = awkward | st.sampled_from(NUMBERS) | st.booleans() | st.integers(-9, 9)


def several(inner):
    sizes = dict(min_size=1, max_size=4)
    return st.lists(inner, **sizes) | st.dictionaries(awkward, inner, **sizes)


@few
@given(st.recursive(leaves, several, max_leaves=12))
def test_yaml_is_read_back(value):
    text = yaml_text(value)
    assert yaml.safe_load(text) == value
    for plain in re.findall(r"(?:^|- |: )([^\s\"].*?)(?=$|: |:$)", text, re.M):
        if plain not in ("true", "false") and not re.fullmatch(r"-?\d", plain) and not plain.startswith("- "):
            assert not any(re.fullmatch(pattern, plain) for pattern in CORE.values()), plain


# ------------------------------------------------------------------------------------------------ the arguments arrive
def line_of(calls: list, *start: str) -> list[str]:
    (call,) = [call for call in calls if call[: len(start)] == list(start)]
    return call


@settings(few, max_examples=30)
@given(line=awkward_words)
def test_a_jobset_gets_the_arguments(line):
    content = yaml_of(text_of("jobset", script=["--", "aot_tpu.py", *line]))
    (slices,) = content["spec"]["replicatedJobs"]
    (container,) = slices["template"]["spec"]["template"]["spec"]["containers"]
    assert [by_kubernetes(word) for word in container["command"]] == ["python", "aot_tpu.py", *line]


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


@settings(few, max_examples=25)
@given(line=awkward_words)
def test_the_hosts_of_a_queued_resource_get_the_arguments(line, home):
    """Through two shells: the reader's, and that of ssh."""
    calls = calls_of(text_of("queued-resource", script=["--", "aot_tpu.py", *line]), home)
    (start,) = [call[-1] for call in calls if call[1:5] == ["compute", "tpus", "tpu-vm", "ssh"] and "nohup" in call[-1]]
    assert words_of(start.removeprefix("--command="), home) == ["aot_tpu.py", *line]


@settings(few, max_examples=25)
@given(line=awkward_words)
def test_a_workload_of_xpk_gets_the_arguments(line, home):
    """Through the reader's shell, a literal block of YAML, Kubernetes and the container's shell."""
    calls = calls_of(text_of("xpk", script=["--", "aot_tpu.py", *line]), home)
    command = line_of(calls, "xpk", "workload", "create")[-1].removeprefix("--command=")
    block = f"command:\n- bash\n- -c\n- |\n  echo start;\n  ({command}) & PID=$!;\n  wait $PID;\n"
    script = yaml.safe_load(block)["command"][2]
    assert words_of(by_kubernetes(script), home) == ["aot_tpu.py", *line]


@settings(few, max_examples=25)
@given(line=awkward_words)
def test_a_run_on_ray_gets_the_arguments(line, home):
    calls = calls_of(text_of("kuberay", script=["--", "aot_tpu.py", *line]), home)
    call = line_of(calls, "python", "-m", "cluster", "run")
    run = ["aot_tpu.py", "--slice", "v5litepod-16", "--name", "aot-tpu", "--plain", "--detach"]
    assert call[4:] == [*run, "--", *line]


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
    jsonschema.Draft202012Validator(SCHEMAS[schema] | {"$defs": SCHEMAS["$defs"]}).validate(content)
    (pod,) = pods_of(content)
    spot = pod["nodeSelector"].get("cloud.google.com/gke-spot")
    assert (spot == "true") == ("--spot" in options)
    assert pod.get("serviceAccountName") == ("trainer" if "--service_account" in options else None)


def pods_of(content: dict) -> list[dict]:
    """The specifications of pods that have chips."""
    if content["kind"] == "JobSet":
        return [job["template"]["spec"]["template"]["spec"] for job in content["spec"]["replicatedJobs"]]
    return [group["template"]["spec"] for group in content["spec"]["workerGroupSpecs"]]


def test_a_misspelt_field_does_not_pass():
    content = yaml_of(text_of("jobset"))
    content["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 4
    with pytest.raises(jsonschema.ValidationError, match="paralelism"):
        jsonschema.Draft202012Validator(SCHEMAS["JobSet"] | {"$defs": SCHEMAS["$defs"]}).validate(content)


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
    requirements = ROOT / "cluster/requirements.txt"
    if requirements.exists():
        assert f"ray[default]=={pods.RAY}" in requirements.read_text()


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


def test_all_mistakes_are_said_at_once():
    err = printed("jobset", *ON_GKE[:2], "--zone", "us-west4", "--name", "A", "--num_slices", "x", *SCRIPT)[2]
    assert len(err.splitlines()) == 4 and err.count("error:") == 1


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


def test_neither_torch_nor_anything_else_is_imported(tmp_path):
    """It may be asked where nothing is installed but Python."""
    source = """import sys; sys.path.insert(0, sys.argv[1])
from cluster import manifests
code = manifests.main(sys.argv[2:])
print(sorted(set(sys.modules) & {"torch", "torch_xla", "jax", "numpy", "ray", "yaml", "tyro"}), file=sys.stderr)
sys.exit(code)"""
    done = run("-c", source, ROOT, "jobset", *ON_GKE, *SCRIPT, cold=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")


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


# ------------------------------------------------------------------------------------------------ beside real programs
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["queued-resource", "kuberay"])
def test_gcloud_knows_every_command_and_option(kind, tmp_path):
    """It reads a command line before it asks who you are. kuberay's are those of jobset, and one more option."""
    if not shutil.which("gcloud"):
        pytest.skip("gcloud is not installed")
    environment = dict(os.environ, CLOUDSDK_CONFIG=str(tmp_path), CLOUDSDK_CORE_DISABLE_PROMPTS="1")
    asked = ["--slice", "tpu7x-256", "--zone", "us-central1-c"] if kind == "kuberay" else []
    account = "trainer" if kind == "kuberay" else "a@b.iam.gserviceaccount.com"
    options = [*asked, "--project", "nobodys", "--spot", "--num_slices", "2", "--service_account", account]
    calls = [call for call in calls_of(text_of(kind, *options), tmp_path) if call[0] == "gcloud"]
    kinds = {tuple(call[1:5]): call for call in calls}
    assert len(kinds) >= 4
    for call in kinds.values():
        said = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120).stderr
        assert re.search(r"active account|credentials|login", said), f"{call}\n{said}"


def test_words_for_kubernetes_and_one_word():
    assert for_kubernetes("$(A) $$ $") == "$$(A) $$$$ $$" and shell_word("a\x01b1") == r"$'a\x01b1'"
