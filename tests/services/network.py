"""Where the machines of a cluster are: on the loopback, or in network namespaces of their own."""

import os
import pwd
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

SIZE = 3
NETWORKS = ("outer", "inner")
"""Clients reach machines through the outer network; machines reach each other through the inner."""


class Network(Protocol):
    """Addresses of machines and a way to start programs there."""

    token: str
    """The name by which `remove` finds what the network made; empty if it makes nothing."""

    def listen(self) -> str:
        """The address that programs of a machine listen on."""

    def host(self, network: str, machine: int) -> str:
        """The machine's address in one of `NETWORKS`."""

    def command(
        self, machine: int, words: Sequence[str], account: pwd.struct_passwd | None
    ) -> list[str]:
        """The words that start a program on the machine, as the account if there is one."""


class Loopback:
    """All machines are 127.0.0.1; their ports tell them apart."""

    token = ""

    def listen(self) -> str:
        return "127.0.0.1"

    def host(self, network: str, machine: int) -> str:
        return "127.0.0.1"

    def command(
        self, machine: int, words: Sequence[str], account: pwd.struct_passwd | None
    ) -> list[str]:
        return [*_as_account(account), *words]


class Namespaces:
    """A network namespace per machine, and one with two bridges, to which all are connected.

    The test's processes are connected to the outer bridge alone. A cut takes a machine's cable out
    of a bridge: nobody is told, packets go nowhere. No packet leaves the computer.
    """

    def __init__(self) -> None:
        self.token = f"tn{os.getpid()}"
        self._number = os.getpid() % 256
        self._switch = f"{self.token}-switch"

    def open(self) -> None:
        """Make the namespaces, the bridges and the cables."""
        ip("netns", "add", self._switch)
        for network in NETWORKS:
            ip("-n", self._switch, "link", "add", network, "type", "bridge")
            ip("-n", self._switch, "link", "set", network, "up")
        for machine in range(SIZE):
            ip("netns", "add", self._name(machine))
            ip("-n", self._name(machine), "link", "set", "lo", "up")
            for network in NETWORKS:
                self._connect(network, machine)
        peer = ("peer", "name", "root", "netns", self._switch)
        ip("link", "add", self.token, "type", "veth", *peer)
        ip("-n", self._switch, "link", "set", "root", "master", "outer", "up")
        ip("addr", "add", f"198.18.{self._number}.254/24", "dev", self.token)
        ip("link", "set", self.token, "up")

    def listen(self) -> str:
        return "0.0.0.0"

    def host(self, network: str, machine: int) -> str:
        return f"198.{18 + NETWORKS.index(network)}.{self._number}.{machine + 1}"

    def command(
        self, machine: int, words: Sequence[str], account: pwd.struct_passwd | None
    ) -> list[str]:
        return ["ip", "netns", "exec", self._name(machine), *_as_account(account), *words]

    def cut(self, network: str, machine: int) -> None:
        """Lose every packet between the machine and the network, without a word to either."""
        ip("-n", self._switch, "link", "set", f"{network}{machine}", "nomaster")

    def restore(self, network: str, machine: int) -> None:
        """End a cut."""
        ip("-n", self._switch, "link", "set", f"{network}{machine}", "master", network)

    def _name(self, machine: int) -> str:
        return f"{self.token}-{machine}"

    def _connect(self, network: str, machine: int) -> None:
        cable, name = f"{network}{machine}", self._name(machine)
        peer = ("peer", "name", network, "netns", name)
        ip("-n", self._switch, "link", "add", cable, "type", "veth", *peer)
        ip("-n", self._switch, "link", "set", cable, "master", network, "up")
        ip("-n", name, "addr", "add", f"{self.host(network, machine)}/24", "dev", network)
        ip("-n", name, "link", "set", network, "up")


def remove(token: str) -> None:
    """Delete the namespaces of that token, if it names any; cables and bridges go with them."""
    if not token:
        return
    for name in ("switch", *range(SIZE)):
        with suppress(RuntimeError):
            ip("netns", "delete", f"{token}-{name}")


def ip(*words: str) -> None:
    """Run `ip`; RuntimeError with the reason and what to do if it cannot."""
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError("no program `ip` was found: install the package iproute2") from None
    if done.returncode != 0:
        raise RuntimeError(
            f"`ip {' '.join(words)}` failed: {done.stderr.strip()}; network namespaces need root"
            " with the capabilities NET_ADMIN and SYS_ADMIN"
        )


def _as_account(account: pwd.struct_passwd | None) -> list[str]:
    """Returns the start of a command that runs as the account and reads what only root may.

    Python and PostgreSQL may be installed below root's home.
    """
    if account is None:
        return []
    ids = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
    reach = ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    return ["setpriv", *ids, *reach, "--"]
