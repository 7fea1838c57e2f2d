"""Makes predictors of what a model does: ranks, weights on a stream of observations, and a kill survived."""

from pjax.training.train import train_predictors as train_predictors
