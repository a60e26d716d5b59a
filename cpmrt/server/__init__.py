"""An OpenAI-compatible HTTP server around one model: `cpmrt serve`. Needs the `server` extra (Starlette, uvicorn)."""
