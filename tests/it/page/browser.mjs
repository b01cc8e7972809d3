// Walks through the operator's page in Chromium as a person would, in light and dark, on a wide and
// a narrow screen, and lets axe look at each page. Usage:
//   node browser.mjs LINK OPERATOR_ADDRESS FOLDER_FOR_SCREENSHOTS
import { AxeBuilder } from "@axe-core/playwright";
import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const [link, base, pictures] = process.argv.slice(2);
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
  ],
});
const context = await browser.newContext({ viewport: { width: 1280, height: 800 } });
context.setDefaultTimeout(60_000);
const page = await context.newPage();
const hosts = new Set();
const faults = [];
page.on("request", (request) => hosts.add(new URL(request.url()).host));
page.on("console", (message) => {
  if (message.type() === "error") faults.push(message.text());
});
page.on("pageerror", (error) => faults.push(String(error)));

const accessible = async (what) => {
  const { violations } = await new AxeBuilder({ page }).analyze();
  const told = violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html)}`);
  assert.deepEqual(told, [], what);
};
const picture = (name) => page.screenshot({ path: `${pictures}/${name}.png`, fullPage: true });
const go = async (section) => {
  await page.getByRole("link", { name: section, exact: true }).click();
  await page.getByRole("heading", { level: 1, name: section }).waitFor();
};

// Without a session every page leads to the login.
await page.goto(`${base}/accounts`);
await page.getByLabel("Operator token").fill("x");
faults.length = 0;
await page.getByRole("button", { name: "Open" }).click();
await page.getByText("no valid operator token").waitFor();
assert.ok(faults.every((fault) => fault.includes("401")), String(faults));
faults.length = 0;
await accessible("login");

await page.goto(link);
await page.getByRole("button", { name: /Open the page/ }).click();
await page.getByText("The node takes requests at").waitFor();
await accessible("overview");

// An account, a key and credits.
await go("Accounts");
await page.getByText("New account").click();
const creation = page.locator("details[open] form");
await creation.getByLabel("Name").fill("<b>Acme</b> & Co.");
await creation.getByLabel("Trial credits").fill("2.5");
await creation.getByRole("button", { name: "Create" }).click();
await page.getByRole("heading", { level: 1, name: "<b>Acme</b> & Co." }).waitFor();
await page.getByText("New key").click();
await page.getByLabel("Label").fill("laptop");
await page.locator("details[open]").getByRole("button", { name: "Create" }).click();
const secret = await page.locator(".notice pre").textContent();
assert.match(secret, /^cresset_key_/);
await page.reload();
assert.equal(await page.locator(".notice pre").count(), 0, "a secret is shown once");
await page.getByText("Grant credits").click();
const grant = page.locator("details[open] form");
await grant.getByLabel("Credits").fill("1");
await grant.getByLabel("Reference").fill("order 1");
await grant.getByRole("button", { name: "Grant" }).click();
await page.getByText("1 credits were granted.").waitFor();
await page.getByText("Take credits back").click();
const debit = page.locator("details[open] form");
await debit.getByLabel("Credits").fill("9");
await debit.getByLabel("Reference").fill("too much");
await debit.getByRole("button", { name: "Debit" }).click();
await page.getByRole("alert").waitFor();
await page.locator("main > details", { hasText: "Set the budget" }).locator("summary").click();
const budget = page.locator("main > details[open] form");
await budget.getByLabel("Credits").fill("2");
await budget.getByLabel("Told at %").fill("80");
await budget.getByRole("button", { name: "Set the budget" }).click();
await page.getByText("The budget counts from now on.").waitFor();
await page.getByText("Change", { exact: true }).first().click();
const change = page.locator("details[open] form").first();
await change.getByLabel("Note").fill("pays monthly");
await change.getByRole("button", { name: "Change", exact: true }).click();
await page.getByText("Note: pays monthly").waitFor();
await accessible("account");
await picture("account");

// A question, charged to the account, which is found by a part of its name.
await go("Chat");
await page.getByLabel("Part of an account's name").fill("ACME");
await page.getByRole("button", { name: "Search" }).click();
await page.getByRole("option", { name: /Acme/ }).waitFor({ state: "attached" });
await page.locator("select[name=account]").selectOption({ index: 0 });
await page.getByLabel("Message").fill("Say hello.");
await page.getByLabel("Message").press("Enter");
await page.locator(".turn.cost").waitFor({ timeout: 60_000 });
assert.ok((await page.locator(".turn.assistant").textContent()).length > 0);
await accessible("chat");
await picture("chat");

// The request that it was, with its attempt; then its answer is erased.
await go("Accounts");
await page.getByRole("link", { name: "<b>Acme</b> & Co." }).click();
await page.getByRole("link", { name: "Requests of the account" }).click();
await page.getByRole("cell", { name: "completed" }).waitFor();
await accessible("requests");
await page.getByRole("row", { name: /completed/ }).getByRole("link").click();
await page.getByRole("heading", { level: 1, name: "Request", exact: true }).waitFor();
await accessible("request");
await picture("request");
await page.getByRole("link", { name: "Requests of the account" }).click();
await page.getByRole("link", { name: "The account" }).click();
await page.getByText("Erase stored answers").click();
await page.getByRole("button", { name: /^Erase/ }).click();
await page.getByText("1 answers were erased.").waitFor();

// The live part changes by itself.
await go("Overview");
await page.getByText(/[1-9]\d* since the start/).waitFor();
await page.evaluate(() => document.getElementById("live").replaceChildren("an old state"));
await page.getByText("an old state").waitFor({ state: "detached" });
await page.getByText(/[1-9]\d* since the start/).waitFor();
await page.getByRole("img", { name: /First token/ }).waitFor();
await picture("overview");

// Memory, and a job whose end is told.
await go("Models");
await page.getByRole("button", { name: "Unload", exact: true }).first().click();
await page.getByText("is being unloaded").waitFor();
await page.getByRole("button", { name: "Load", exact: true }).first().click();
await page.getByText("is being loaded").waitFor();
await page.getByLabel("Release, or repository of the hub").fill("--no-such-release");
await page.getByRole("button", { name: "Fetch" }).last().click();
await page.getByText(/failed with exit code/).first().waitFor({ timeout: 60_000 });
await accessible("models");
await picture("models");

await go("Acts");
await page.getByRole("cell", { name: "credit_debit" }).first().waitFor();
await accessible("acts");
await picture("acts");

// Dark, and as narrow as a phone; nothing is wider than the screen.
await page.emulateMedia({ colorScheme: "dark", reducedMotion: "reduce" });
await page.setViewportSize({ width: 390, height: 844 });
for (const section of ["Overview", "Accounts", "Models", "Chat", "Acts"]) {
  await go(section);
  await accessible(`${section}, dark and narrow`);
  const wide = await page.evaluate(() => document.documentElement.scrollWidth);
  assert.ok(wide <= 390, `${section} is ${wide} pixels wide`);
  await picture(`${section.toLowerCase()}-dark-narrow`);
}

// By keyboard alone.
await page.goto(`${base}/accounts`);
await page.keyboard.press("Tab");
await page.keyboard.press("Enter");
assert.equal(await page.evaluate(() => document.activeElement.id), "content");

// Without scripts: pages tell what they tell, and forms work.
const cookies = await context.cookies();
const plain = await browser.newContext({ javaScriptEnabled: false });
await plain.addCookies(cookies);
const still = await plain.newPage();
await still.goto(`${base}/`);
await still.getByText("The node takes requests at").waitFor();
assert.match(await still.locator("noscript").textContent(), /load it again/);
await still.goto(`${base}/accounts`);
await still.locator("summary", { hasText: "New account" }).click();
await still.getByLabel("Name", { exact: true }).fill("plain");
await still.getByRole("button", { name: "Create" }).click();
await still.getByRole("heading", { level: 1, name: "plain" }).waitFor();

await page.goto(`${base}/`);
await page.getByRole("button", { name: "Leave" }).click();
await page.getByLabel("Operator token").waitFor();
await page.goto(`${base}/accounts`);
await page.getByLabel("Operator token").waitFor();
assert.deepEqual([...hosts], [new URL(base).host], "no other host is asked");
assert.deepEqual(faults, [], "the console has no errors");
await browser.close();
console.log("every page is as it should be");
