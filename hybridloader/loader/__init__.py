"""`DataLoader` and `StatefulDataLoader`: replacements for torch's and torchdata's, on the engine.

- The front (`dataloader`, `stateful_dataloader`) makes a plan (`plan`), which reads the attributes of
  the loader once.
- The iterator (`iterator`) runs an epoch of the plan. `state` begins the epoch, and `progress`
  counts it.
- The state (`state`) is a dict of these counts and the samplers' states; `stateful_dataloader`
  converts it to torchdata's form.

Imports go from the front to the iterator, then to the state, then to the plan and `progress`.
"""
