import os
import socket
import subprocess

import pytest

from flows.service.addresses import _Port, kept_port
from heterps_core.errors import ConfigurationError


def test_a_free_port_passes_and_a_taken_one_names_its_owner():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = listener.getsockname()[1]
        port = _Port("a test", "PORT_X", number)
        with pytest.raises(
            ConfigurationError, match=rf"port {number}.*by process {os.getpid()}.*PORT_X=<port>"
        ):
            port.check_is_free()

    port.check_is_free()


TAKE = """
import socket, sys
address, port = sys.argv[1:]
server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
if ":" in address:
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
server.bind((address, int(port)))
server.listen()
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a second account needs root")
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_kept_port_is_taken_by_servers_of_this_user_alone(address):
    with kept_port(0) as keeper:
        number = keeper.getsockname()[1]

        def taken_by(user):
            command = ["/usr/bin/python3", "-I", "-c", TAKE, address, str(number)]
            done = subprocess.run(
                command, user=user, group=user, extra_groups=[], cwd="/", capture_output=True, check=False
            )
            return done.stderr.decode()

        assert "Address already in use" in taken_by(65_534)
        assert taken_by(os.geteuid()) == ""
        with pytest.raises(ConfigurationError, match="is taken"):
            _Port("a test", "PORT_X", number).keep()
