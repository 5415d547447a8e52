// Numbers as text, and the work of a machine between two of its events.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export function count(number) {
  return whole.format(number);
}

// About three digits.
export function rate(number) {
  if (number === 0) return "0";
  return number < 100 ? fine.format(number) : whole.format(number);
}

export function bytes(number) {
  if (number >= 1e9) return `${fine.format(number / 1e9)} GB`;
  return number >= 1e6 ? `${whole.format(number / 1e6)} MB` : `${whole.format(number / 1e3)} kB`;
}

export function share(part, all) {
  return all > 0 ? `${whole.format((100 * part) / all)}\u00a0%` : "–";
}

export function milliseconds(seconds) {
  const ms = seconds * 1e3;
  return ms < 9.995 ? ms.toFixed(2) : ms < 99.95 ? ms.toFixed(1) : ms.toFixed(0);
}

// Tokens per second between two events. Prompt tokens count over the time of their steps (0: there was none, or ranks
// have not reported yet), generated ones over the clock.
export function speeds(before, now) {
  const since = (read) => read(now) - read(before);
  const prompts = since(({ stats }) => stats.prefill_by_token_tokens_total + stats.prefill_by_tensor_tokens_total);
  const busy = since(({ ranks: [first] }) => first?.step_seconds_total - first?.decode_seconds_total);
  const made = since(({ stats }) => stats.generated_tokens_total), seconds = since(({ clock }) => clock);
  const per = (tokens, time) => (tokens > 0 && time > 0 ? tokens / time : 0);
  return { prefill: per(prompts, busy), decode: per(made, seconds) };
}

// One rank's work between two events, in seconds per step; null if it did no step.
export function stepsOf(before, now) {
  const since = (name) => now[name] - before[name];
  const steps = since("steps_total");
  if (!(steps > 0)) return null;
  const seconds = since("step_seconds_total") / steps;
  const wait = since("wait_seconds_total") / steps, exchange = since("exchange_seconds_total") / steps;
  const decode = since("decode_seconds_total");
  return {
    seconds, wait, exchange, compute: Math.max(0, seconds - wait - exchange),
    read: decode > 0 ? since("decode_read_bytes_total") / decode : null,
  };
}

const CLEARLY = 1.03; // a rank counts as the slowest from this multiple of the quickest rank's time

// The number of the rank that the others wait for; -1 if there is no clear one.
export function slowestOf(steps) {
  if (steps.length < 2 || steps.some((step) => step === null)) return -1;
  const own = steps.map(({ seconds, exchange }) => seconds - exchange);
  const most = Math.max(...own);
  return most > CLEARLY * Math.min(...own) ? own.indexOf(most) : -1;
}

// The busiest expert of each layer with experts, and its load as a multiple of the mean.
export function expertLoads(stats) {
  const names = Object.keys(stats).filter((name) => name.startsWith("expert_imbalance.layer."));
  const layers = names.map((name) => Number(name.slice(name.lastIndexOf(".") + 1))).sort((a, b) => a - b);
  return layers.map((layer) =>
    ({ layer, expert: stats[`expert_busiest.layer.${layer}`], times: stats[`expert_imbalance.layer.${layer}`] }));
}
