"""LeNet by name, for `syncline train startup_task.py:task`."""

from __future__ import annotations

from syncline import Task, sgd
from syncline.lab.bench.scripts.startup_samples import samples

task = Task(model="lenet", data=samples(), optimizer=sgd(lr=0.05, momentum=0.9))
