"""`DataLoader` and `StatefulDataLoader`: replacements for torch's and torchdata's, on the engine.

The front (`dataloader`, `stateful_dataloader`) makes a plan (`plan`: what the loader's attributes say,
read once) and hands it to a pass (`iterator`, begun by `pass_start`), which is counted in `progress`.
The state (`state`, `torchdata_form`) is these counts and the samplers' states, written as a dict and
read again: imports go from the front to the pass, then to the state, then to the plan and `progress`.
"""
