"""What it gains: one file per `paceline bench NAME`, all of one shape and one JSON contract."""
