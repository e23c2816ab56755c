"""Strategies as people write them, and as they mis-write them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from syncline.config.spec import Spec
from syncline.errors import ConfigError
from syncline.strategies.hierarchy import Hierarchy
from syncline.strategies.how import BF16, Int8, OneBit, TopK
from syncline.strategies.own import Own
from syncline.strategies.presets import PRESETS
from syncline.strategies.reading import read_strategy
from syncline.strategies.strategy import Strategy
from syncline.strategies.switching import Phase, Switching, Until
from syncline.strategies.what import Models, Updates
from syncline.strategies.when import Async, Every, Layerwise, Stale
from syncline.strategies.whom import Memory, Neighbors, Rivals, Server

HOGWILD = Strategy(when=Async(), whom=Memory())
SPARKNET = Strategy(what=Updates(), when=Every(10))


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("async | server", Strategy(when=Async(), whom=Server())),
        ("Async(push=2) | Server(2)", Strategy(when=Async(2), whom=Server(2))),
        ("gradients|async(4,fetch=8)|server", Strategy(when=Async(4, 8), whom=Server())),
        ("stale(0) | server | int8", Strategy(when=Stale(0), whom=Server(), how=Int8())),
        ("async | server(optimizer=adagrad(lr=0.01))",
         Strategy(when=Async(), whom=Server(1, Spec("Adagrad", {"lr": 0.01})))),
        ("async | server(optimizer=AdamW)", Strategy(when=Async(), whom=Server(1, Spec("AdamW")))),
        ("async | server(optimizer=rmsprop(0.1, alpha=0.9))",
         Strategy(when=Async(), whom=Server(1, Spec("RMSprop", {"lr": 0.1, "alpha": 0.9})))),
        ("async | server(optimizer='sgd(lr=1)')", Strategy(when=Async(), whom=Server(1, Spec("SGD", {"lr": 1})))),
        ("layerwise(rates={'fc-async': 4}, others=2) | server",
         Strategy(when=Layerwise({"fc-async": 4}, 2), whom=Server())),
        ("updates | neighbors(topology='static-exponential')",
         Strategy(what=Updates(), whom=Neighbors("static-exponential"))),
        ("updates | neighbors(static-exponential)", Strategy(what=Updates(), whom=Neighbors("static-exponential"))),
        ("gossip(ring)", Strategy(what=Updates(), whom=Neighbors("ring"))),
        ("models(score=accuracy) | every(9) | rivals",
         Strategy(what=Models("accuracy"), when=Every(9), whom=Rivals())),
        ("hierarchy(inside_host=hogwild, across_hosts=updates | every(5), group=3)",
         Hierarchy(HOGWILD, Strategy(what=Updates(), when=Every(5)), 3)),
        ("hierarchy(async | memory, sparknet + bf16)",
         Hierarchy(HOGWILD, Strategy(what=Updates(), when=Every(10), how=BF16()))),
        ("h2o + int8", Hierarchy(HOGWILD, Strategy(what=Updates(), when=Every(5), how=Int8()))),
        ("allreduce until epoch 1, then sparknet(10)", Switching((Phase(Strategy(), Until("epoch", 1)),), SPARKNET)),
        ("allreduce until step 50, then allreduce + onebit until epoch 3, then sparknet",
         Switching((Phase(Strategy(), Until("step", 50)), Phase(Strategy(how=OneBit()), Until("epoch", 3))), SPARKNET)),
        ("  AllReduce UNTIL Step 5 then h2o", Switching((Phase(Strategy(), Until("step", 5)),), PRESETS["h2o"].make())),
        ("allreduce + topk(0.5) until step 5, then hierarchy(allreduce, sparknet)",
         Switching((Phase(Strategy(how=TopK(0.5)), Until("step", 5)),), Hierarchy(Strategy(), SPARKNET))),
        ("my_strategy.py:Partial(tau=5)", Own("my_strategy.py", "Partial", (), {"tau": 5})),
        ("my_package.my_module:Partial", Own("my_package.my_module", "Partial")),
        ("../with blank/c++/it.py:make(1, 'until step 3, then x', x=inf)",
         Own("../with blank/c++/it.py", "make", (1, "until step 3, then x"), {"x": float("inf")})),
        ("C:\\mine\\it.py:make()", Own("C:\\mine\\it.py", "make")),
    ],
)  # fmt: skip
def test_strategies_are_read_as_people_write_them(text, meant):
    assert read_strategy(text) == meant
    assert read_strategy(str(meant)) == meant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("server-asynk", "Did you mean 'server-async'"),
        ("hogwilt", "Did you mean 'hogwild'?"),
        ("hierachy(hogwild, sparknet)", "Did you mean 'hierarchy'?"),
        ("downpour(pus=4)", "The preset downpour has no setting 'pus'. Did you mean 'push'?"),
        ("hogwild(2)", "The preset hogwild cannot be used so"),
        ("asink | server", "There is no answer 'asink'. Did you mean 'async'?"),
        ("hierarchy(inside=hogwild, across_hosts=sparknet)", "Did you mean 'inside_host'?"),
        ("hierarchy(inside_host=hogwild)", "missing a required argument: 'across_hosts'"),
        ("hierarchy(inside_host=hogwilt, across_hosts=sparknet)", "Did you mean 'hogwild'?"),
        ("gossip(topology=rign)", "There is no topology 'rign'. Did you mean 'ring'?"),
        ("gossip(topology='rign')", "There is no topology 'rign'. Did you mean 'ring'?"),
        ("models(score=acuracy) | rivals", "There is no score 'acuracy'. Did you mean 'accuracy'?"),
        ("async | server(optimizer=adagard(lr=1))", "Did you mean 'adagrad'"),
        ("async | server(optimizer=adagrad(lrr=1))", "has no setting 'lrr'. Did you mean 'lr'?"),
        ("async | server(optimizer=adagrad(1, 2))", "every setting needs its name"),
        ("async | server(optimizer=lbfgs)", "LBFGS cannot step at a server"),
        ("updates(outer=elastik(0.2)) | server", "Did you mean 'elastic'?"),
        ("easgd(rate='high')", "a value is of the wrong kind"),
        ("easgd(rate=2)", "must be above 0 and at most 1"),
        ("sparknet(tau=ten)", "Cannot read the value 'ten' of tau"),
        ("downpour(lr=0)", "must be a number above 0"),
        ("h2o | int8", "h2o is a whole strategy"),
        ("allreduce until epok 1, then sparknet", "Did you mean 'epoch'?"),
        ("allreduce until epoch one, then sparknet", "the number must be a whole one"),
        ("allreduce until epoch 0, then sparknet", "epochs are counted from 1"),
        ("allreduce until epoch 1", "is written 'allreduce until epoch 1, then sparknet'"),
        ("allreduce until epoch 1, sparknet", "is written 'allreduce until epoch 1, then sparknet'"),
        ("until epoch 1, then sparknet", "is written 'allreduce until epoch 1, then sparknet'"),
        ("allreduce, then sparknet", "is written 'allreduce until epoch 1, then sparknet'"),
        ("allreduce until epoch 1, then sparknett", "Did you mean 'sparknet'?"),
        ("allreduce until epoch 2, then onebit until epoch 1, then sparknet", "over before it begins"),
        ("mine.py:A until epoch 1, then sparknet", "There is no file 'mine.py'"),
        ("mine.py:A + int8", "a strategy of one's own says itself"),
        ("mine.py:A(b=c)", "write plain values"),
        ("mine.py", "Name the strategy that is in it, such as 'mine.py:Name'"),
        ("mine:1", "is no name of a class or function"),
        ("a b:C", "is neither a file nor a module"),
        ("async", "Use 'gradients | async | server'"),
        ("async.x | server", "a name is wanted here"),
        ("allreduce(**{})", "every setting is given once, by its name"),
    ],
)
def test_nonsense_is_answered_with_what_would_be_right(text, words):
    with pytest.raises(ConfigError) as caught:
        read_strategy(text)
    assert words in str(caught.value)


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("TAU = 7\n")
    path = tmp_path / "my_strategy.py"
    path.write_text(
        """
from dataclasses import dataclass
import helper

NUMBER = 3

@dataclass
class Partial:
    tau: int = helper.TAU
    def exchange(self, replica): ...

class Mute: ...

class Deaf:
    def exchange(self): ...

def fails(): raise RuntimeError("no luck")
"""
    )
    return path


def test_ones_own_strategy_is_made_from_a_file_and_from_a_module(own_file):
    assert read_strategy("my_strategy.py:Partial(tau=5)").make().tau == 5
    assert read_strategy(f"{own_file}:Partial").make().tau == 7
    assert read_strategy("my_strategy:Partial(4)").make().tau == 4
    assert str(own_file.parent) not in sys.path
    del sys.modules["my_strategy"], sys.modules["helper"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("my_strategi.py:Partial", "Did you mean 'my_strategy.py'?"),
        ("nowhere/at/all.py:Partial", "There is no file 'nowhere/at/all.py'"),
        ("my_strategy.py:Partail", "Did you mean 'Partial'?"),
        ("my_strategy.py:Partial(tua=5)", "'tua'. Did you mean 'tau'?"),
        ("my_strategy.py:Partial(1, 2)", "too many positional arguments"),
        ("my_strategy.py:NUMBER", "is of type int, but a class or function is wanted"),
        ("my_strategy.py:Mute", "has no method 'exchange(replica)'"),
        ("my_strategy.py:Deaf", "must take one argument"),
        ("my_strategy.py:fails", "RuntimeError: no luck"),
        ("no_such_package.module:Partial", "There is no module 'no_such_package'"),
        ("broken.py:Partial", "broken.py could not be imported: ModuleNotFoundError"),
        ("broken:Partial", "broken could not be imported: ModuleNotFoundError"),
    ],
)
def test_a_mistake_in_ones_own_strategy_is_answered(own_file, text, words):
    own_file.with_name("broken.py").write_text("import no_such_thing_at_all\n")
    with pytest.raises(ConfigError) as caught:
        read_strategy(text).make()
    assert words in str(caught.value)
    sys.modules.pop("helper", None)


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2} | {object}, print])
def test_ones_own_strategy_gets_plain_values_only(value):
    with pytest.raises(ConfigError, match="only plain values reach a worker"):
        Own("mine.py", "A", settings={"x": value})


def test_everything_about_strategies_works_without_torch():
    code = (
        "import sys\n"
        "from syncline.strategies.reading import read_strategy\n"
        "from syncline.strategies.method import RunConditions\n"
        "import syncline.strategies.explain, syncline.cli.tables\n"
        "for text in ('h2o + bf16', 'allreduce + powersgd until epoch 1, then nexus(0.1)', 'gossip(ring)', 'ltfb'):\n"
        "    strategy = read_strategy(text)\n"
        "    strategy.method.check_run(RunConditions(workers=4))\n"
        "syncline.cli.tables.strategy_table()\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
