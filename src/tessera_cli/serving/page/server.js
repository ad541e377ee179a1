// Requests to the server that this page came from.

/** What the server answered in place of a result; its message is for the user. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Fetch `path` with the API key, if there is one; throws ServerError for anything but success. */
export async function request(path, { key, body, signal } = {}) {
  const headers = new Headers();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  if (body) headers.set("Content-Type", "application/json");
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (!response.ok) throw new ServerError(response.status, await messageOf(response));
  return response;
}

/** Words for whatever was thrown. */
export function wordsFor(error) {
  if (error instanceof ServerError) return error.message;
  return "The server cannot be reached.";
}

async function messageOf(response) {
  if (response.status === 401) return "The server asks for an API key; enter it under Settings.";
  try {
    const { error, detail } = await response.json();
    return error?.message ?? (typeof detail === "string" ? detail : `Error ${response.status}`);
  } catch {
    return `Error ${response.status}`;
  }
}
