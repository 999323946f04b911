"""Who is where: named axes, the groups along them, what all ranks agree on, collectives between them."""
