"""Prefill of EDA on the CPU: a chunked form in PyTorch (float32, all cores) beside this crate's engine.

    pip install torch
    cargo build --release
    python benches/pytorch_chunked.py

The PyTorch form is the usual one: what does not depend on the state is computed for all chunks and heads in batched
products, then a loop over the chunks, batched over the heads, takes the state through. Inside a chunk decays are split
around its start, exp(G_t) * exp(-G_s), which is as fast as it gets and overflows where gates are strong
(g = -5 fits 16 tokens, no more); the engine has no such limit. Chunk lengths are tried and the fastest counts. Both are
checked against the recurrence token by token in float64. The engine's time is `compute_ms` of `eda run`, the
best of as many processes as PyTorch has runs, in turns with them.
"""

import argparse
import json
import os
import struct
import subprocess
import tempfile
import time

import torch


def recurrence(q, k, e, v, g, beta, gamma):
    """Eq. (8), token by token; tensors [T, H, ...]."""
    tokens, heads, width = q.shape
    state = torch.zeros(heads, width, v.shape[-1], dtype=q.dtype)
    out = []
    for t in range(tokens):
        state = state * g[t].exp()[..., None]
        state = state - (gamma[t][:, None] * e[t])[..., None] * (e[t][:, None] @ state)
        rest = v[t][:, None] - k[t][:, None] @ state
        state = state + (beta[t][:, None] * k[t])[..., None] * rest
        out.append((q[t][:, None] @ state)[:, 0] * width**-0.5)
    return torch.stack(out), state


def chunked(q, k, e, v, g, beta, gamma, chunk):
    """The chunk form; tensors [T, H, ...], T a multiple of `chunk`."""
    tokens, heads, width = q.shape
    count, values = tokens // chunk, v.shape[-1]

    def split(x):  # [T, H, D] -> [H, chunks, chunk, D]
        return x.view(count, chunk, heads, -1).permute(2, 0, 1, 3).contiguous()

    def pairs(x, y):  # sub-steps of a token one after the other
        return torch.stack((x, y), 3).flatten(2, 3)

    q, k, e, v, g = split(q), split(k), split(e), split(v), split(g)
    beta, gamma = split(beta[..., None]), split(gamma[..., None])
    decay = g.cumsum(2)
    start, end = decay.exp(), decay[:, :, -1:]
    read = pairs(e * start, k * start)
    writes = e * gamma, k * beta
    back = (-decay).exp()
    column = pairs(writes[0] * back, writes[1] * back).transpose(2, 3)
    back = (end - decay).exp()
    write = pairs(writes[0] * back, writes[1] * back).transpose(2, 3)
    query = q * start * width**-0.5

    step = torch.arange(2 * chunk)
    mixing = (read @ column).tril_(-1)
    output = (query @ column).masked_fill_(step > 2 * torch.arange(chunk)[:, None] + 1, 0)
    right = torch.cat((read, pairs(torch.zeros_like(v), v)), 3)
    solved = torch.linalg.solve_triangular(mixing, right, upper=False, unitriangular=True)
    from_state, content = solved[..., :width], solved[..., width:]
    o = output @ content
    left = torch.cat((from_state, output @ from_state - query), 2)
    end = end.exp().transpose(2, 3)

    state = torch.zeros(heads, width, values)
    for n in range(count):
        x = left[:, n] @ state
        u = content[:, n] - x[:, : 2 * chunk]
        o[:, n] -= x[:, 2 * chunk :]
        state = torch.baddbmm(state * end[:, n], write[:, n], u)
    return o.permute(1, 2, 0, 3).reshape(tokens, heads, values), state


def inputs(tokens, heads, width):
    torch.manual_seed(0)

    def unit():
        x = torch.randn(tokens, heads, width)
        return x / x.norm(dim=-1, keepdim=True)

    gate = torch.rand(tokens, heads), torch.rand(tokens, heads)
    v = torch.randn(tokens, heads, width)
    return unit(), unit(), unit(), v, -torch.rand(tokens, heads, width) ** 2, *gate


def save(path, tensors, metadata):
    header, at = {"__metadata__": metadata}, 0
    for name, x in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(x.shape),
            "data_offsets": [at, at + 4 * x.numel()],
        }
        at += 4 * x.numel()
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            file.write(x.contiguous().numpy().tobytes())


def load(path, name):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(length))[name]
        first, last = entry["data_offsets"]
        file.seek(8 + length + first)
        data = bytearray(file.read(last - first))
    return torch.frombuffer(data, dtype=torch.float32).view(entry["shape"])


def error(x, right):
    return ((x.double() - right).abs().max() / right.abs().max()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="K = V")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--eda", default="target/release/eda")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    torch.set_grad_enabled(False)

    data = inputs(options.tokens, options.heads, options.width)
    right, _ = recurrence(*(x.double() for x in data))
    names = "q", "k", "e", "v", "g", "beta", "gamma"
    with tempfile.TemporaryDirectory() as folder:
        source, result = f"{folder}/in.safetensors", f"{folder}/out.safetensors"
        tensors = {name: x[None] for name, x in zip(names, data)}
        save(source, tensors, {"rule": "eda"})
        command = [options.eda, "run", source, "--backend", "cpu", "--json"]
        subprocess.run([*command, "-o", result], check=True, capture_output=True)
        engine_error = error(load(result, "o")[0], right)

        chunks = 16, 32, 64
        best = dict.fromkeys(chunks, float("inf"))
        worst, engine = {}, float("inf")
        for _ in range(options.runs):
            for chunk in chunks:
                start = time.perf_counter()
                o, _ = chunked(*data, chunk)
                best[chunk] = min(best[chunk], (time.perf_counter() - start) * 1e3)
                worst[chunk] = error(o, right)
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            engine = min(engine, json.loads(run.stdout)["compute_ms"])

    shape = f"T = {options.tokens}, H = HV = {options.heads}, K = V = {options.width}"
    print(f"EDA prefill, {shape}, float32, {options.threads} threads, best of {options.runs}")
    for chunk in chunks:
        name = f"PyTorch {torch.__version__}, chunks of {chunk}"
        print(f"{name}: {best[chunk]:.1f} ms, error {worst[chunk]:.1e}")
    fastest = min(best[chunk] for chunk in chunks if worst[chunk] < 1e-3)
    print(f"eda: {engine:.1f} ms, error {engine_error:.1e}; {fastest / engine:.2f} times as fast")


if __name__ == "__main__":
    main()
