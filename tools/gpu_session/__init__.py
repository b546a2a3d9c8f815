"""What to run on an NVIDIA GPU that is at hand for minutes only, on a machine without a network.

    python -m tools.gpu_session prepare [--have FILE] [--cuda-arch 90]    # where there is a network
    python -m tools.gpu_session run [--seconds N] [--copy-to FOLDER]      # beside the GPU

`prepare` packs what the machine lacks into parts that are small enough to be sent one by one. `run`
unpacks them and runs the steps in order of worth (`steps.py`), each with a time limit of its own.
Results are written after every step, and a later run skips the steps that have ended.

Both need the standard library only. docs/gpu.md tells how to use them.
"""
