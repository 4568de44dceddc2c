"""Workers that are processes: what their backends share."""
