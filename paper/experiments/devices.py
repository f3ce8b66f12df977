"""Records by device: which of them are judged, which are put together, and tables of each device's."""

from collections.abc import Iterable

from paper.experiments.engine.records import Record, key

# The slugs are names of folders, too long for a phone's screen.
_NAMES = {"cpu-intel-xeon-processor": "Xeon (CPU)", "cpu-amd-epyc": "EPYC (CPU)", "nvidia-h200": "H200 (GPU)"}


def shown_name(device: str) -> str:
    """A device's name as tables, figures and verdicts show it: 'Xeon (CPU)'. One of another machine stays as it is."""
    return _NAMES.get(device, device)


def on_cpu(device: str) -> bool:
    """Whether a device's name is that of a CPU, or of all of them together ('cpu')."""
    return device.partition("-")[0] == "cpu"


def by_device(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records grouped by device, in their order."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["device"], []).append(record)
    return groups


def judged_device(records: Iterable[Record]) -> str:
    """The device whose records claims are judged by: a CPU if there is one; '' without records."""
    return min((record["device"] for record in records), key=lambda name: (not on_cpu(name), name), default="")


def pooled(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Training runs by device; those of all CPUs are put together as 'cpu', which comes first. If several CPUs ran a
    case, the one whose name comes first counts.

    Processors round differently, which changes what a run learns only as much as another seed does.
    """
    found: dict[str, dict[str, Record]] = {"cpu": {}}
    for record in sorted(records, key=lambda record: str(record["device"])):
        name = "cpu" if on_cpu(record["device"]) else record["device"]
        found.setdefault(name, {}).setdefault(key(record["configuration"]), record)
    return {name: list(group.values()) for name, group in found.items() if group}


def of_judged_devices(records: Iterable[Record]) -> list[Record]:
    """The training runs by which claims are judged: those of all CPUs, or else of the first device."""
    return next(iter(pooled(records).values()), [])
