"""Owns the head process of the laptop stack, Ray's driver: `python -m deploy.local.head`, started by stack.py.

Must not outlive its supervisor, nor print anything but one JSON object per line on standard output.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from deploy.local.ports import free_ports
from services.process.hosting import add_redis_option, configure_logging

if TYPE_CHECKING:
    from deploy.hosting.session import Session

log = logging.getLogger(__name__)

DRAIN_S = 12.0


def _report(phase: str, text: str = "") -> None:
    print(json.dumps({"phase": phase, "text": text}), flush=True)


def _stop(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # the drain has a time limit; a second signal must not cut it short
    raise SystemExit(0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_redis_option(parser)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--cores", required=True, type=int)
    parser.add_argument("--folder", required=True, type=Path)
    return parser.parse_args()


def _serve(arguments: argparse.Namespace) -> None:
    """Start Ray and the gateway, report each phase, and supervise the gateway until a signal arrives."""
    _report("ray", "starting Ray")
    from deploy.hosting.session import GatewayFailedError, Session, start_ray, stop_ray

    session: Session | None = None
    try:
        start_ray(arguments.folder, arguments.cores, free_ports)
        _report("gateway", "starting the gateway and Ray Serve")
        session = Session(arguments.redis, (arguments.host, arguments.port))
        session.watch(lambda: _report("ready"))
    except GatewayFailedError as error:
        _report("failed", str(error))
        raise SystemExit(1) from None
    except Exception:
        # Ray itself is lost, so nothing can drain; the supervisor ends the remaining processes.
        log.exception("the head process failed")
        logging.shutdown()
        os._exit(1)
    finally:
        _report("stopping", "draining")
        if session is not None:
            session.stop(DRAIN_S)
        stop_ray()
        _report("stopped")


def main() -> None:
    """Run until SIGTERM."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging("head")
    _serve(_arguments())


if __name__ == "__main__":
    main()
