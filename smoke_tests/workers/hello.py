"""Say who this rank is: a launcher that works at all."""

from smokelib import rank as ranks

if __name__ == "__main__":
    ranks.main(lambda rank: rank.result(rank=rank.rank, world=rank.world))
