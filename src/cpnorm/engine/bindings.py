"""verl's engine with another loss function bound to it than the actor's `partial(ppo_loss)`."""

import functools

from verl.workers.config import McoreCriticConfig
from verl.workers.utils.losses import ppo_loss, value_loss

from cpnorm.engine.step import Engine


class Closure(Engine):
    """The same call of `ppo_loss` by a closure, which has no `keywords` for a guard to read."""

    def postprocess_micro_batch_func(self, *args, loss_function, **options):
        config = loss_function.keywords["config"]

        def closure(**arguments):
            return ppo_loss(config, **arguments)

        return super().postprocess_micro_batch_func(*args, loss_function=closure, **options)


class Critic(Engine):
    """verl's `value_loss`, bound to a critic's configuration as verl's trainers bind it.

    In place of a value head: log-probabilities are the values, the old ones are the old values, and
    advantages are the returns. The mode is the case's.
    """

    def prepare_model_outputs(self, output, data):
        return {"values": output["log_probs"]}

    def postprocess_micro_batch_func(self, output, data, *args, loss_function, **options):
        actor = loss_function.keywords["config"]
        config = McoreCriticConfig(
            ppo_micro_batch_size_per_gpu=actor.ppo_micro_batch_size_per_gpu,
            loss_agg_mode=actor.loss_agg_mode,
        )
        data["values"], data["returns"] = data["old_log_probs"], data["advantages"]
        bound = functools.partial(value_loss, config=config)
        return super().postprocess_micro_batch_func(
            output, data, *args, loss_function=bound, **options
        )


BINDINGS = {"actor": Engine, "closure": Closure, "critic": Critic}
"""Name: engine."""
