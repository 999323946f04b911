"""Functions on ranks: in processes of a pool, in those that a launcher started, or on one rank of a fake world."""
