"""Variables of NCCL and of torch's group of it. NCCL tells GPUs apart by the host's name and the GPU's."""

from __future__ import annotations

from .env import own_environment

_HOST = "NCCL_HOSTID"


def nccl_host() -> str:
    """Return the name that this process's host has for NCCL alone; empty: its own."""
    return own_environment().get(_HOST, "")


def share_device(devices: int) -> None:
    """Let NCCL take all ranks of a host with fewer `devices`, by sockets: each has a host's name of its own."""
    environ = own_environment()
    if int(environ.get("LOCAL_WORLD_SIZE", "1")) > devices:
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        environ[_HOST] = f"rank {environ['RANK']} of {nccl_host() or 'this host'}"


def expect_single_sends() -> None:
    """Do not let torch advise against single sends and receives: it means groups of several neighbours."""
    own_environment().setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
