"""TensorBoard event files of a run, in a form that survives kills and resumes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _start_number(name: str) -> int:
    digits = name.removeprefix("events.out.tfevents.").partition(".")[0]
    return int(digits) if re.fullmatch("[0-9]{1,18}", digits) else 0


class EventFiles:
    """Event files in run_dir/tensorboard, in TensorBoard's own record format.

    Uses RecordWriter, since EventFileWriter would load TensorFlow where it is installed, put the
    host name into the file name, and lose what its thread has not written at a kill -9.
    """

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        events: Any = event_pb2  # protobuf makes the classes at run time
        summaries: Any = summary_pb2
        self._event, self._summary = events.Event, summaries.Summary
        directory = run_dir / "tensorboard"
        directory.mkdir(exist_ok=True)
        older = [p.name for p in directory.glob("events.out.tfevents.*")]
        # TensorBoard reads files in the order of their names, so each gets a larger number than
        # those before (older versions of sparrow had the time there).
        number = 1 + max((_start_number(name) for name in older), default=0)
        name = f"events.out.tfevents.{number:010d}.{os.getpid()}.{resume_step}"
        self._records = RecordWriter((directory / name).open("wb"))
        self._add(file_version="brain.Event:2")
        if older:  # tells TensorBoard to drop this and later steps of the older files
            start = events.SessionLog(status=events.SessionLog.START)
            self._add(step=resume_step, session_log=start)

    def _add(self, **fields: Any) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._records.flush()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record of metrics.jsonl: its numbers, and p5 and p1 of its length bins."""
        summary = self._summary()
        for key, value in record.items():
            if "/" in key and isinstance(value, (int, float)):
                summary.value.add(tag=key, simple_value=float(value))
        for entry in record["bins"]:
            for name in ("p5", "p1"):
                if isinstance(entry.get(name), (int, float)):
                    tag = f"bins/{name}_from_{entry.get('start', entry.get('bin'))}"
                    summary.value.add(tag=tag, simple_value=float(entry[name]))
        self._add(step=record["step"], summary=summary)

    def close(self) -> None:
        """Close the file; every record was flushed when it was written."""
        self._records.close()
