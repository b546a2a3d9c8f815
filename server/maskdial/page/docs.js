/** Swagger UI over this server's OpenAPI document. */

import { get } from "./api.js";
import { authorization } from "./key.js";

globalThis.SwaggerUIBundle({
  spec: await get("openapi.json"),
  dom_id: "#swagger",
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  requestInterceptor(request) {
    Object.assign(request.headers, authorization());
    return request;
  },
});
