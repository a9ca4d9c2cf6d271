"""The pages of results/tasks/: every sweep of a task, with what it says and does not say."""
