"""Profile files: what is read, and the damage that is refused in one line."""

import json

import pytest

from common.errors import UserError
from common.schedule.profile_file import load_profile
from tests.common.profile_tables import TABLE, profile


def test_profile_files(tmp_path):
    path = tmp_path / "p.json"
    more = {"shape": [], "topk": [{"k": 4}], "source": "text", "interval": "blocks", "policy": "x"}
    for good in (profile(TABLE), profile(TABLE, halves=(TABLE, {4: [0.9]}), **more)):
        path.write_text(json.dumps(good))
        assert load_profile(path) == good
    for change, message in [
        (lambda p: p["rows"].append(dict(p["rows"][1])), "stated twice"),
        (lambda p: p["rows"][1].update(end=100), "not 64 tokens wide"),
        (lambda p: p["rows"][1].update(p5=None), r"rows\[1\].p5=None: expected a number"),
        (lambda p: p["rows"][1].update(p5=1.2), r"p5=1.2"),
        (lambda p: p["rows"][1].pop("p1_low"), "'p1_low' is missing"),
        (lambda p: p["rows"][1].update(k=-4), "k=-4: expected an integer"),
        (lambda p: p["rows"][1].update(enough=1), "expected true or false"),
        (lambda p: p.update(rows={}), "rows: expected a list, got dict"),
        (lambda p: p.update(quantiles=0.05), "quantiles=0.05: expected a list"),
        (lambda p: p.update(format="x"), "format='x'"),
        (lambda p: p.pop("model"), "'model' is missing"),
        (lambda p: p.update(model=3), "model=3: expected a string"),
        (lambda p: p.update(halfs=[]), "unknown key 'halfs'; did you mean 'halves'"),
        (lambda p: p.update(halves=None), "halves: expected a list of two objects"),
        (lambda p: p["halves"].pop(), "halves: expected a list of two objects"),
        (lambda p: p["halves"][1].update(n=3), r"halves\[1\]: unknown key 'n'"),
        (lambda p: p["halves"][1]["rows"][0].pop("p5"), r"halves\[1\].rows\[0\]: key 'p5' is miss"),
        (lambda p: p["halves"][0]["rows"][0].update(start=1), r"halves\[0\].rows\[0\]: bin 0"),
        (lambda p: p.update(source=["a"]), "source: expected a string, got list"),
        (lambda p: p.update(topk={}), "topk: expected a list, got dict"),
        (lambda p: p.update(versions=5), "versions=5: expected an object of strings"),
        (lambda p: p.update(versions={"numpy": float("nan")}), "expected an object of strings"),
        (lambda p: p.update(page_size=2**31), "page_size=2147483648: expected an integer at most"),
        (lambda p: p.update(bin_tokens=10**30), "bin_tokens=10+: expected an integer at most"),
        (lambda p: p["rows"][1].update(p5=10**400), "p5=10+: expected a number in"),
        (lambda p: p["rows"][1].update(p5=float("nan")), "p5=nan: expected a number in"),
        (lambda p: p["rows"][1].update(bin=10**9), r"bin=10+: expected an integer in \[0, 65535"),
    ]:
        data = json.loads(json.dumps(profile(TABLE, halves=(TABLE, TABLE))))
        change(data)
        path.write_text(json.dumps(data))
        with pytest.raises(UserError, match=message) as error:
            load_profile(path)
        assert "\n" not in str(error.value)
