"""Serve a folder on the loopback address: `python -m cpnorm.serve FOLDER PORT`."""

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer


def bind(folder, port):
    """A server for `folder` on 127.0.0.1 at `port`, or at a free port when that one is taken."""
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        print(f"Port {port} cannot be used ({error.strerror}); taking another one.", flush=True)
        return server


def main(folder, port):
    if not port.isdecimal() or not 0 <= int(port) < 65536:
        sys.exit(f"PORT={port} is not a port; give a number from 0 to 65535.")
    with bind(folder, int(port)) as server:
        print(f"The book is at http://127.0.0.1:{server.server_port}/ (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main(*sys.argv[1:])
