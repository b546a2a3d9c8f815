"""Outcome: what a kind of faults has found; what several kinds share."""

import argparse
import re
from dataclasses import dataclass

import httpx

from loadtests import add_number
from loadtests.measurement import Section
from loadtests.server import ServerProcess

_BUSY = re.compile(r"^maskdial_(?:queue_size|requests_running)\{.*\} (?!0\.0$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The report, and whether anything was lost, wrong or broken."""

    section: Section
    failed: bool


def add_clients(parser: argparse.ArgumentParser, default: int) -> None:
    """Adds ``--clients``."""
    add_number(parser, "--clients", default, "N", "requests that are open at a time")


async def busy_gauges(server: ServerProcess) -> list[str]:
    """The gauges of waiting and running requests that are not at zero."""
    async with httpx.AsyncClient(base_url=server.url) as http:
        return _BUSY.findall((await http.get("/metrics")).text)
