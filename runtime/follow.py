"""The process of a rank other than 0, as binding/ranks.py starts it: `python -m llmc.runtime.follow JSON`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading


def _end_with_parent() -> None:
    """Ends the process when its standard input, to which nothing is written, closes with rank 0's process."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> int:
    """Does this rank's part until rank 0 ends; returns 1 if a rank has failed."""
    work = json.loads(sys.argv[1])
    # Rank 0 drains on these signals, and needs this rank until then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.sched_setaffinity(0, work["cpus"])
    from llmc.runtime.binding.artifact import Artifact
    from llmc.runtime.binding.devices import Device
    from llmc.runtime.binding.handle import LlmcError, call

    try:
        with Device(work["kind"], work["options"]) as device, Artifact(work["artifact"]) as artifact:
            call("llmc_device_follow", device.pointer, artifact.pointer)
    except LlmcError as error:
        print(f"llmc: rank {work['options']['rank']}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stderr.flush()
    # Skips interpreter shutdown: the thread that waits for rank 0 is still reading.
    os._exit(code)
