"""Prints the engine's times beside PyTorch's: table.py MARCH.json TORCH.json."""

import json
import sys


def main():
    with open(sys.argv[1]) as file:
        march = {entry["name"]: entry["ms"] for entry in json.load(file)["results"] if "ms" in entry}
    with open(sys.argv[2]) as file:
        torch = json.load(file)
    print(f"| {'operation':54} | march ms | PyTorch ms | PyTorch / march |")
    print(f"|{'-' * 56}|---------:|-----------:|----------------:|")
    for name, peer in torch.items():
        own = march.get(name.split(" (")[0])
        times = f"{'missing':>8} | {peer:10.2f} | {'':15}" if own is None else f"{own:8.2f} | {peer:10.2f} | {peer / own:15.2f}"
        print(f"| {name:54} | {times} |")
    missing = [name for name in torch if name.split(" (")[0] not in march]
    if missing:
        sys.exit(f"the engine's benchmark has no result for: {', '.join(missing)}")


if __name__ == "__main__":
    main()
