import warnings


def test_all(world):
    from whole_optimizers import MAKE, trained

    warnings.simplefilter("ignore")
    for kind in MAKE:
        try:
            (dense,) = world.run(1, trained, (), kind, None)
        except Exception as e:
            print(kind, "DENSE FAILS", str(e)[-300:])
            continue
        row = []
        for how in ("wrapped", "on pieces"):
            try:
                split = world.run(2, trained, (("tensor", 2),), kind, how)[0]
                row.append(max(float((split[n] - dense[n]).abs().max() / dense[n].abs().max()) for n in dense))
            except Exception as e:
                row.append(str(e)[-400:])
        print("ROW", kind, row, flush=True)
