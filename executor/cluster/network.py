"""Names the network interface that the cluster uses on this node.

vLLM and gloo would otherwise guess it from the host's name.
"""

from __future__ import annotations

import os


def use_interface_of(address: str) -> None:
    """Have vLLM and gloo use the interface with this address.

    Variables that the environment sets already stay. gloo asks for the address of the host's name, which on many machines and
    in most containers is the loopback interface or another one than the cluster's; vLLM asks for the way to the internet, and
    a private network has none.
    """
    import psutil

    os.environ.setdefault("VLLM_HOST_IP", address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
