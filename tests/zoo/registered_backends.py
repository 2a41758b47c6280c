"""Backends that `planting` puts into a folder, as an installed package has them."""

BACKENDS = """
import os, signal, sys, time

def dies(gm, inputs):
    os.kill(os.getpid(), getattr(signal, os.environ["HOW"]))

def later(gm, inputs):
    return lambda *args: dies(gm, args)

def leaves(gm, inputs):
    os._exit(int(os.environ["HOW"]))

def hangs(gm, inputs):
    print("hanging", flush=True)
    while True:
        time.sleep(0.01)

def deaf(gm, inputs):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hangs(gm, inputs)

def fails(gm, inputs):
    raise ValueError("cannot")

def wrong(gm, inputs):
    return lambda *args: [value + 1 for value in gm.forward(*args)]

def good(gm, inputs):
    return gm.forward
"""
