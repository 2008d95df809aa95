"""A server that starts, answers and fails as SGLang's does, in the way that FAKE says: fake_sglang.py --port N ..."""

import gzip
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dsv4lab.serving import receipts, settings

MODE = os.environ.get("FAKE", "")
STUBBORN = """import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] == "away":
    os.setsid()
time.sleep(600)"""
TRACEBACK = """[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "a.py", line 1, in f
    work()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in g
    f()
RuntimeError: Capture cuda graph failed
[2026-01-01 00:00:01] Received sigquit from a child process. It usually means the child failed."""
EVENTS = [
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "pid": 1, "tid": 1, "ts": 1.0, "dur": 1.0,
     "args": {"correlation": 1}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "pid": 1, "tid": 1, "ts": 2.0, "dur": 9.0,
     "args": {"correlation": 2}},
    {"ph": "X", "cat": "kernel", "name": "work", "pid": 0, "tid": 7, "ts": 3.0, "dur": 2.5,
     "args": {"correlation": 1, "device": 0, "stream": 7}},
]  # fmt: skip
OVERRIDE = "--json-model-override-args"


def flag(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


RANKS = int(flag("--tp-size", "1"))
CAPTURE = "\rCapturing batches (bs=32 avail_mem=10.12 GB):  25%|##5       | 3/12 [00:01<00:03]"


def events(rank: int) -> list[dict]:
    """Of one rank, or, of several, two steps of 15 and 16 µs with an attention and an all-reduce."""
    if RANKS == 1:
        return EVENTS
    found, same = [], {"ph": "X", "pid": 1, "tid": 1}
    for step in range(2):
        at = 100.0 * step
        found.append(same | {"cat": "user_annotation", "name": "step[DECODE bs=2]", "ts": at, "dur": 50.0})
        for n, (name, us) in enumerate((("split_k_kernel", 5.0 + rank), ("cross_device_reduce_1stage", 8.0))):
            call = {"correlation": 10 * step + n + 1}
            found.append(
                same | {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": at + 1, "dur": 1.0, "args": call}
            )
            where = {"device": rank, "stream": 7}
            kernel = {"cat": "kernel", "name": name, "ts": at + 3 + (7 + rank) * n, "dur": us, "args": call | where}
            found.append(same | {"tid": 7} | kernel)
    return found


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        info = {"version": "0.5.14", "tp_size": RANKS, "api_key": os.environ.get("DSV4LAB_API_KEY")}
        info |= {"context_length": int(flag("--context-length", "0")), "json_model_override_args": flag(OVERRIDE, "{}")}
        info["hooks"] = os.environ["DSV4LAB"]
        memory = {"weight": 1.0, "kvcache": 2.0, "graph": 0.0 if "--disable-cuda-graph" in sys.argv else 0.35}
        info["internal_states"] = [{"api_key": "inner", "last_gen_throughput": 1.0, "memory_usage": memory}]
        self.answer(b"junk" if MODE == "junk" and self.path == "/server_info" else json.dumps(info).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if MODE == "refuses" or (MODE == "refuses-load" and body.get("stream")):
            self.send_error(500, "no")
            return
        if self.path == "/start_profile":
            self.answer(b"Start profiling.\n")
            for rank in range(RANKS if MODE != "no-trace" else 0):
                told = {"schemaVersion": 1, "asked": body, "traceEvents": events(rank)}
                told |= {"distributedInfo": {"rank": rank}}
                path = Path(body["output_dir"]) / f"1.5-TP-{rank}.trace.json.gz"
                path.write_bytes(gzip.compress(json.dumps(told).encode()))
            return
        if body.get("stream"):
            self.stream(body["sampling_params"]["max_new_tokens"])
            return
        if body.get("return_logprob"):
            self.answer(json.dumps(score(body)).encode())
            return
        for rank in range(int(os.environ.get("FAKE_RANKS", RANKS))):
            for hook, impl in settings.parse(os.environ["DSV4LAB"]).active.items():
                receipts.write(
                    receipts.Receipt(kind="live", hook=hook, impl=impl, rank=rank, pid=1000 + rank, sglang="0.5.14")
                )
        self.answer(json.dumps({"meta_info": {"completion_tokens": 4}}).encode())

    def stream(self, tokens: int) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            for count in range(1, tokens + 1):
                self.wfile.write(f'data: {{"meta_info": {{"completion_tokens": {count}}}}}\n\n'.encode())
                time.sleep(0.005)
            self.wfile.write(b"data: [DONE]\n\n")
        except BrokenPipeError:
            pass  # the client has seen enough

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


def score(body: dict) -> list[dict]:
    """Two greedy tokens of a model with 40 of them, whose noise is a matter of batch size, hooks and ranks."""
    replies, wanted = [], body.get("token_ids_logprob") or [None] * len(body["input_ids"])
    noisy = 10 if MODE == "drifts" and "attention" in os.environ["DSV4LAB"] else 1
    for prompt, params, ids in zip(body["input_ids"], body["sampling_params"], wanted, strict=True):
        said, steps = [], []
        for _ in range(params["max_new_tokens"]):
            rng = random.Random(str((prompt[:3], said)))
            noise = random.Random(str((prompt[:3], said, len(body["input_ids"]), os.environ["DSV4LAB"], RANKS)))
            logits = [rng.gauss(0, 3) + noisy * noise.gauss(0, 0.01) for _ in range(40)]
            for token, bias in params.get("logit_bias", {}).items():
                logits[int(token)] += bias
            for token in set(said):
                logits[token] -= params.get("frequency_penalty", 0) + params.get("presence_penalty", 0)
            total = math.log(sum(map(math.exp, logits)))
            found = sorted(((logit - total, token, None) for token, logit in enumerate(logits)), reverse=True)
            said.append(found[0][1])
            steps.append(found)
        about = {
            "output_token_logprobs": [found[0] for found in steps],
            "output_top_logprobs": [found[: body["top_logprobs_num"]] for found in steps],
        }
        if ids:
            about["output_token_ids_logprobs"] = [[each for each in found if each[1] in ids] for found in steps]
        replies.append({"output_ids": said, "meta_info": about})
    return replies


def main() -> None:
    print("arguments:", *sys.argv[1:], flush=True)
    print("key:", os.environ.get("DSV4LAB_API_KEY"), flush=True)
    print("plugins:", os.environ.get("SGLANG_PLUGINS"), flush=True)
    print("path:", os.environ.get("PYTHONPATH"), ":", sep="", flush=True)
    if MODE == "crash" or (MODE == "crash-compiling" and "--enable-torch-compile" in sys.argv):
        sys.exit(TRACEBACK)
    if MODE == "family":
        for where in ("here", "away"):
            print("child:", subprocess.Popen([sys.executable, "-c", STUBBORN, where]).pid, flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if MODE == "slow":
        for text in ("Load weight begin. avail mem=90 GB", "Load weight end. elapsed=1 s", CAPTURE):
            print(text, flush=True)
            time.sleep(0.3)
    if MODE == "hangs":
        print("[2026-01-01 00:00:00] Load weight begin. avail mem=90 GB", flush=True)
        time.sleep(600)
    ThreadingHTTPServer(("127.0.0.1", int(flag("--port", "0"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
