import signal
import subprocess
import sys

from clients.run import end

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"


def test_a_server_that_does_not_go_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
    end(process, patience=0.2)
    assert process.returncode == -signal.SIGKILL
