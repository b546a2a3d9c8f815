"""`POST /models/{name}`: the task of whatever model it is."""

from fastapi import APIRouter, Request, Response

from maskdial.api.generate import serve_generate
from maskdial.api.masked import serve_classify, serve_fill_mask
from maskdial.served import Models

router = APIRouter(tags=["models"])


@router.post("/models/{name}")
async def serve_model(request: Request, name: str) -> Response:
    """Answers with the named model; the body is that of the model's task."""
    models: Models = request.app.state.models
    task = models.get(name).bundle.manifest.task
    content = await request.body()
    if task == "fill-mask":
        return await serve_fill_mask(request, content, name)
    if task == "classify":
        return await serve_classify(request, content, name)
    return await serve_generate(request, content, name, as_list=True)
