// Shows the API reference. A request that is tried out carries the token of the page, if it is signed in.
const token = sessionStorage.getItem("penstock-token");
window.ui = SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#reference",
  deepLinking: true,
  validatorUrl: null,
  requestInterceptor: (request) => {
    if (token && new URL(request.url, location.href).origin === location.origin) {
      request.headers.Authorization ??= `Bearer ${token}`;
    }
    return request;
  },
});
