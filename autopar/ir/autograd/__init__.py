"""A model's own use of autograd: functions with a backward of their own, hooks, gradients inside forward."""
