"""``maskdial verify``: whether a log's replies are the model's."""
