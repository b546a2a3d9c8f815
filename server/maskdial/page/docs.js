/** Swagger UI over this server's OpenAPI document. */

import { authorization } from "./key.js";

globalThis.SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger",
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  requestInterceptor(request) {
    Object.assign(request.headers, authorization());
    return request;
  },
});
