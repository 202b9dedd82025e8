"""What a model says with autograd itself: functions with a backward of their own, hooks, gradients inside forward."""
