"""Execute jobs: models, tokenizer, engine, Celery tasks."""
