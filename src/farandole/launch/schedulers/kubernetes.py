"""``--on kubernetes``: manifests for kubectl. No cluster is asked and no client library needed.

Three kinds do the same: `TrainJob` (Kubeflow Trainer v2), `JobSet`, and a plain indexed `Job` with a headless
Service. Each pod is a node and runs ``farandole run``, which starts the pod's ranks: it finds its place in
``PET_*`` (set by Kubeflow's torch runtime), or in the Job's completion index and what the manifest says.

>>> print(to_yaml({"kind": "Job", "args": ["run", "8"]}), end="")
kind: Job
args:
- run
- "8"
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.launcher_env import DEFAULT_PORT
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import write_notice
from ..job.contract import GRACE_SECONDS
from .submission import SubmitSpec

# Plain data as YAML text, for manifests: block style, keys in their order, nothing needed to write it.

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS_WITH_A_MEANING = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def to_yaml(value: Any) -> str:
    """Return mappings, sequences, texts, numbers, booleans and None as one YAML document."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        found = []
        for key, each in value.items():
            below = _lines(each)
            if _is_nested(each):
                indent = "" if isinstance(each, Sequence) else "  "
                found += [f"{_scalar(key)}:", *(indent + line for line in below)]
            else:
                found.append(f"{_scalar(key)}: {below[0]}")
        return found
    if _is_nested(value):
        found = []
        for each in value:
            first, *rest = _lines(each)
            found += [f"- {first}", *("  " + line for line in rest)]
        return found
    return [_scalar(value)]


def _is_nested(value: Any) -> bool:
    return isinstance(value, Sequence | Mapping) and not isinstance(value, str) and bool(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS_WITH_A_MEANING:
        return value
    # JSON's scalars and empty brackets are YAML's, but for its escapes of letters beyond 16 bits.
    text = json.dumps(value, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in text)


FORMAT = "yaml"
_OPTIONS = ("image", "namespace", "kind", "queue", "priority", "runtime")
_LONGEST_NAME = 45
"""Names of pods and their numbers are made of it, and a label of DNS has 63 letters."""
_LABEL = "farandole/job"


def render(spec: SubmitSpec) -> str:
    """Return the manifests of the kind that was asked for."""
    spec.only("kubernetes", *_OPTIONS)
    kind = spec.options.get("kind", "trainjob")
    if "image" not in spec.options:
        raise ConfigError("--on kubernetes needs the image of the pods", remedy="give --image NAME")
    if len(spec.options["image"].split()) != 1:
        raise ConfigError(f"--image {spec.options['image']!r}: expected a name such as registry/train:1")
    if "runtime" in spec.options and kind != "trainjob":
        raise ConfigError(f"--runtime is for --kind trainjob, not {kind}", remedy="leave it out")
    return "---\n".join(to_yaml(manifest) for manifest in KINDS[kind](spec))


def start(spec: SubmitSpec) -> int:
    """Raise `ConfigError`: the manifests are handed in with kubectl."""
    render(spec)
    raise ConfigError(
        "--on kubernetes writes manifests and talks to no cluster",
        remedy="farandole run --on kubernetes --dry-run -o yaml ... | kubectl apply -f -",
    )


def _train_job(spec: SubmitSpec) -> list[dict[str, Any]]:
    nodes, per_node = spec.shape()
    if "priority" in spec.options and "queue" not in spec.options:
        raise ConfigError(
            "--priority of a TrainJob is read by Kueue only", remedy="add --queue, or use --kind job or jobset"
        )
    if spec.grace_seconds > GRACE_SECONDS:
        write_notice(
            f"note: pods of a TrainJob end when its runtime says: set terminationGracePeriodSeconds to "
            f"{_pod_seconds(spec)} there, or use --kind job"
        )
    trainer = {
        "image": spec.options["image"],
        **_program(spec, nodes * per_node),
        "numNodes": nodes,
        "numProcPerNode": per_node,
        **_resources(spec, per_node, "resourcesPerNode"),
    }
    runtime = _name(spec.options.get("runtime", "torch-distributed"), "--runtime", most=253)
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": _metadata(spec, priority=True),
            "spec": {"runtimeRef": {"name": runtime}, "trainer": trainer},
        }
    ]


def _job_set(spec: SubmitSpec) -> list[dict[str, Any]]:
    nodes, per_node = spec.shape()
    name = _job_name(spec)
    job = _indexed_job(spec, nodes, per_node, address=f"{name}-node-0-0.{name}", subdomain=None)
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(spec),
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
            },
        }
    ]


def _job(spec: SubmitSpec) -> list[dict[str, Any]]:
    nodes, per_node = spec.shape()
    name = _job_name(spec)
    subdomain = name if nodes > 1 else None
    job = _indexed_job(spec, nodes, per_node, address=f"{name}-0.{name}", subdomain=subdomain)
    manifests: list[dict[str, Any]] = [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(spec), "spec": job}
    ]
    if subdomain is not None:
        # Pods find node 0 by name before it is ready: readiness is not what they wait for.
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {_LABEL: name}}
        manifests.insert(0, {"apiVersion": "v1", "kind": "Service", "metadata": _place(spec), "spec": service})
    return manifests


KINDS: dict[str, Callable[[SubmitSpec], list[dict[str, Any]]]] = {
    "trainjob": _train_job, "jobset": _job_set, "job": _job,
}  # fmt: skip


def _indexed_job(
    spec: SubmitSpec, nodes: int, per_node: int, *, address: str, subdomain: str | None
) -> dict[str, Any]:
    """Return the spec of a Job whose pods are numbered: one a node, none is tried again alone."""
    container: dict[str, Any] = {
        "name": "node",
        "image": spec.options["image"],
        **_program(spec, nodes * per_node),
        **_resources(spec, per_node, "resources"),
    }
    if nodes > 1:
        values = {"NODE_COUNT": nodes, "LOCAL_SIZE": per_node, "ADDRESS": address, "PORT": DEFAULT_PORT}
        container["env"] = [{"name": f"FARANDOLE_{name}", "value": str(value)} for name, value in values.items()]
    pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
    if spec.grace_seconds != GRACE_SECONDS:
        pod["terminationGracePeriodSeconds"] = _pod_seconds(spec)
    if subdomain is not None:
        pod["subdomain"] = subdomain
    if "priority" in spec.options:
        pod["priorityClassName"] = _name(spec.options["priority"], "--priority", most=253)
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "template": {"metadata": {"labels": {_LABEL: _job_name(spec)}}, "spec": pod},
    }


def _pod_seconds(spec: SubmitSpec) -> int:
    """Return how long a pod may take to end: what its ranks have, and then their launcher."""
    return math.ceil(spec.grace_seconds) + 5


def _program(spec: SubmitSpec, size: int) -> dict[str, Any]:
    command, *arguments = spec.inner(size, ("farandole",))
    return {"command": [command], "args": arguments}


def _resources(spec: SubmitSpec, per_node: int, key: str) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if spec.gpus_per_node is not None:
        limits["nvidia.com/gpu"] = str(spec.gpus_per_node)
    requests = {} if spec.cpus_per_rank is None else {"cpu": str(per_node * spec.cpus_per_rank)}
    found = {name: value for name, value in (("limits", limits), ("requests", requests)) if value}
    return {key: found} if found else {}


def _metadata(spec: SubmitSpec, *, priority: bool = False) -> dict[str, Any]:
    """Return name, namespace and, for Kueue, the queue (and the priority, when pods do not carry it)."""
    labels = {}
    if "queue" in spec.options:
        labels["kueue.x-k8s.io/queue-name"] = _name(spec.options["queue"], "--queue")
    if priority and "priority" in spec.options:
        labels["kueue.x-k8s.io/priority-class"] = _name(spec.options["priority"], "--priority")
    return {**_place(spec), **({"labels": labels} if labels else {})}


def _place(spec: SubmitSpec) -> dict[str, Any]:
    namespace = spec.options.get("namespace")
    return {
        "name": _job_name(spec),
        **({} if namespace is None else {"namespace": _name(namespace, "--namespace")}),
    }


def _job_name(spec: SubmitSpec) -> str:
    """Return a name made of the script's: lower-case letters, digits and hyphens, beginning with a letter."""
    made = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")
    if not made[:1].isalpha():
        made = f"run-{made}".rstrip("-")
    return made[:_LONGEST_NAME].rstrip("-")


def _name(text: str, option: str, *, most: int = 63) -> str:
    if len(text) > most or not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", text):
        raise ConfigError(
            f"{option} {text!r}: expected a name of Kubernetes, lower-case letters, digits and hyphens"
        )
    return text
