// Owns the page of someone who is not signed in. Must not keep what was typed.
import { html, useState } from "../vendor/vendor.js";
import { checkedSignIn } from "../app/api.js";

export function SignIn() {
  const [problem, setProblem] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    const typed = new FormData(event.target).get("token").trim();
    if (!typed) return setProblem("A token is needed.");
    if (/[^\x21-\x7e]/.test(typed)) return setProblem("That is no token: it has characters that no token has.");
    try {
      await checkedSignIn(typed);
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<main class="signin card">
    <h1>Penstock</h1>
    <p>Sign in with a token of this platform. On a laptop, <code>penstock up</code> prints a link that signs you in; on a cluster, ask whoever runs it.</p>
    <form onSubmit=${submit}>
      <label for="token">Token</label>
      <input id="token" name="token" type="password" autocomplete="off" spellcheck=${false} autofocus aria-describedby="problem" />
      <p id="problem" class="fault" role="alert">${problem}</p>
      <button class="main" type="submit">Sign in</button>
    </form>
  </main>`;
}
