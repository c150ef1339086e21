import os
import socket

import pytest

from flows.service.addresses import Port
from heterps_core.errors import ConfigurationError


def test_a_free_port_passes_and_a_taken_one_names_its_owner():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = listener.getsockname()[1]
        port = Port("a test", "PORT_X", number)
        with pytest.raises(
            ConfigurationError, match=rf"port {number}.*by process {os.getpid()}.*PORT_X=<port>"
        ):
            port.check_is_free()

    port.check_is_free()
