"""`Pipeline`: stages composed by hand, on the engine."""
