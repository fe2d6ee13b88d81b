"""What a job is: input, submission, dispatch, results, the command line. Needs no accelerator."""
