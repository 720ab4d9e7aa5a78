"""Checkpoints and servers for the tests in this folder."""

import contextlib
import json
import signal
import subprocess
import threading
import time
import time
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def checkpoint(march, folder, preset="tiny/march", end_of_text=True):
    """The folder of a model of bytes with random weights.

    Without an end-of-text token, texts end only where requests say.
    """
    output = Path(folder, preset.replace("/", "-") + ("" if end_of_text else "-endless"))
    if not output.exists():
        text = (CONFIGS / f"{preset}.toml").read_text(encoding="utf-8")
        if not end_of_text:
            text = text.replace("vocab_size = 257", "vocab_size = 256")
        config = output.with_suffix(".toml")
        config.write_text(text, encoding="utf-8")
        command = [march, "init", "--config", config, "--output", output]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return output


def trained(march, folder, preset="tiny/march", steps=60):
    """The folder of a small model of bytes that was trained for some seconds, so that it writes letters."""
    output = Path(folder, preset.replace("/", "-") + "-trained")
    if not output.exists():
        small = ["hidden_size=64", "num_hidden_layers=2", "intermediate_size=128", "num_heads=2"]
        if preset != "tiny/transformer":
            small.append("head_dim=32")
        if preset in ("tiny/march", "tiny/memory-caching"):
            small.append("anchor_interval=16")
        settings = [f"model.{one}" for one in small]
        settings += ["data.sequence_length=256", "train.tokens_per_step=2048", "train.save_every=0"]
        command = [march, "train", preset, "--run", output, "--steps", str(steps)]
        command += [f"--set={one}" for one in settings]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"march train failed: {done.stderr}")
    return output


class NotStarted(RuntimeError):
    """A server that ended before it served: with a code and what it said."""

    def __init__(self, code, said):
        super().__init__("march serve did not start: " + said.strip())
        self.code, self.said = code, said


class Server:
    """A running `march serve`. `before` is a command of the shell, such as `umask 000`, that holds for it."""

    def __init__(self, march, model, *flags, name="tiny", threads=2, addr="127.0.0.1:0", before=None):
        command = [march, "serve", "--json", "--model", model, "--name", name, "--addr", addr, "--threads", threads]
        command = [str(part) for part in [*command, *flags]]
        if before:
            command = ["sh", "-c", f'{before}; exec "$@"', "sh", *command]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace")
        self.said = []
        # Keep reading, so that the server never waits for its log.
        self.reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True)
        self.reader.start()
        ready = self.process.stdout.readline()
        if not ready:
            code = self.process.wait()
            self.reader.join()
            raise NotStarted(code, "".join(self.said))
        self.url = json.loads(ready)["url"]
        # What it says before it serves is read by the other thread.
        while not any("serving " in line for line in list(self.said)):
            time.sleep(0.01)
        self.port = int(self.url.rsplit(":", 1)[1])

    def memory(self, name):
        """Bytes of a line of the process' status."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"the server has no {name}")

    def resident(self):
        """Bytes of memory that the process has now."""
        return self.memory("VmRSS")

    def peak(self):
        """The most bytes of memory that the process had since its start."""
        return self.memory("VmHWM")

    def kill(self):
        """Ends the process at once (`kill -9`)."""
        self.process.kill()
        self.process.wait()
        self.reader.join()

    def stop(self, within=60):
        """Ends the process as a service manager does; it must end with code 0. Returns the seconds that it took."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout=within)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"march serve did not end within {within} s after SIGTERM") from None
        seconds = time.monotonic() - start
        self.reader.join()
        if code != 0:
            raise RuntimeError(f"march serve ended with code {code}: " + "".join(self.said[-20:]))
        return seconds


@contextlib.contextmanager
def server(march, model, *flags, **more):
    """A server for a block of code, which is stopped with SIGTERM after it."""
    running = Server(march, model, *flags, **more)
    try:
        yield running
    except BaseException:
        running.kill()
        raise
    running.stop()


def refused(march, model, *flags, **more):
    """The code and the words of a server that should not start; code 0 if it does, after which it is killed."""
    try:
        running = Server(march, model, *flags, **more)
    except NotStarted as error:
        return error.code, error.said
    running.kill()
    return 0, "".join(running.said)


def parts(lines):
    """The JSON parts of a stream of server-sent events, and whether it ended with `[DONE]`."""
    found, done = [], False
    for line in lines:
        if line.startswith("data: "):
            if line == "data: [DONE]":
                done = True
            else:
                found.append(json.loads(line[len("data: ") :]))
    return found, done
