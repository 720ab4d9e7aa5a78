"""Reads a diary once, asks several questions about it, and shows what each answer read."""

import march_lm
from march_lm import Bank, Model

DAYS = (
    "3 May: the key is in the barn, the map in the shed, the lamp in the hotel, the coat in the garage. That was 3 May. "
    "4 May: the key is in the castle, the map in the barn, the lamp in the shed, the coat in the hotel. That was 4 May. "
    "5 May: the key is in the garage, the map in the hotel, the lamp in the barn, the coat in the castle. That was 5 May. "
)


def ask(bank: Bank, question: str) -> str:
    """The answer to a question; the bank stays as it is."""
    return "".join(bank.fork().generate(question, 8, temperature=0.0)).strip()


def most_read(model: Model, text: str) -> str:
    """The part of a text that its last token reads most."""
    routing = model.routing(text)
    if len(routing.boundaries) == 0:
        return ""
    anchor = routing.weights[:, -1].mean(1).max(0).argmax()  # mean over heads, the best layer
    start, end = routing.ranges[anchor]
    return routing.text[start:end].strip()


model = march_lm.load()
bank = model.bank(storage="int8")
bank.read(DAYS)
for question in ["Where was the key on 3 May?", "Where was the key on 4 May?"]:
    print(f"{question} {ask(bank, question)} (read: {most_read(model, DAYS + question)})")
print(f"{bank.tokens} tokens in {bank.bytes} bytes, {len(bank.anchors)} anchors")
