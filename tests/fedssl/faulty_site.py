"""`fedssl` for a site that breaks rounds where files say so: faulty_site.py FOLDER ARGUMENTS...

FOLDER/seed-0-client-1-round-2 holds `nan`, `shape` or `hang`. The file is removed when that round's training is over
and the fault begins, so the round goes well when it is done again.
"""

import sys
import time
from pathlib import Path

from fedssl.cli import main
from fedssl.method import Method

folder = Path(sys.argv.pop(1))
real = Method.client_round


def client_round(method, client, received, number):
    reply = real(method, client, received, number)
    file = folder / f"seed-{method.seed}-client-{client.index}-round-{number}"
    fault = file.read_text() if file.exists() else ""
    file.unlink(missing_ok=True)
    name = next(iter(reply.tensors))
    if fault == "nan":
        reply.tensors[name][:] = float("nan")
    elif fault == "shape":
        reply.tensors[name] = reply.tensors[name][1:]
    elif fault == "hang":
        time.sleep(24 * 3600)
    return reply


Method.client_round = client_round
main()
