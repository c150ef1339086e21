"""The chapters of train-ctr: a run is opened, planned, trained, judged and recorded."""
