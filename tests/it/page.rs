//! The operator's page: in a real browser, and against requests that no page of its own sends.

use super::clients::{javascript, node_script};
use super::process::{Folder, Reply, Served, request};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The browser: the one that `CHROMIUM` names, which must be there, or Debian's.
fn chromium() -> Option<PathBuf> {
    let debians = || Some(PathBuf::from("/usr/bin/chromium")).filter(|path| path.exists());
    std::env::var_os("CHROMIUM").map(PathBuf::from).or_else(debians)
}

fn link(folder: &Folder, roles: &[&str]) -> String {
    let roles = roles.iter().flat_map(|role| ["--role", *role]);
    let arguments: Vec<&str> = ["admin", "link"].into_iter().chain(roles).collect();
    folder.json(&arguments)["url"].as_str().unwrap().to_owned()
}

#[test]
fn a_person_walks_through_it() {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/page");
    let (packages, installed) = javascript("browser", &scripts.join("package.json"));
    let (Some(chromium), Ok(())) = (chromium(), &installed) else {
        eprintln!("SKIPPED: the page in a browser: no Chromium, or {installed:?}");
        return;
    };
    let folder = Folder::ready();
    let node = folder.serve();
    let pictures = packages.join("pictures");
    std::fs::create_dir_all(&pictures).unwrap();
    let walked = node_script(&packages, &scripts.join("browser.mjs"))
        .args([&link(&folder, &["operate", "money"]), &node.operator])
        .arg(pictures)
        .env("CHROMIUM", chromium)
        .output()
        .unwrap();
    assert!(walked.status.success(), "{}", String::from_utf8_lossy(&walked.stderr));
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
    assert!(node.terminate().success());
}

/// A browser without scripts, as far as the node can tell.
struct Visitor<'a> {
    node: &'a Served,
    cookie: String,
    form: String,
}

impl<'a> Visitor<'a> {
    fn open(node: &'a Served, link: &str) -> Self {
        let path = link.strip_prefix(&node.operator).unwrap();
        let opened = request(&node.operator, &format!("POST {path} HTTP/1.1\r\n"), "").finish();
        assert_eq!((opened.status, opened.header("location")), (303, Some("/")));
        let cookie = opened.header("set-cookie").unwrap();
        assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"), "{cookie}");
        let cookie = cookie.split(';').next().unwrap().to_owned();
        let mut visitor = Self { node, cookie, form: String::new() };
        let page = visitor.get("/");
        let (_, rest) = page.body.split_once("name=\"form\" value=\"").unwrap();
        rest.split('"').next().unwrap().clone_into(&mut visitor.form);
        visitor
    }

    fn get(&self, path: &str) -> Reply {
        let head = format!("GET {path} HTTP/1.1\r\nCookie: {}\r\n", self.cookie);
        request(&self.node.operator, &head, "").finish()
    }

    fn post(&self, path: &str, headers: &str, body: &str) -> Reply {
        let kind = if path == "/chat" { "json" } else { "x-www-form-urlencoded" };
        let head = format!(
            "POST {path} HTTP/1.1\r\nCookie: {}\r\nContent-Type: application/{kind}\r\n{headers}",
            self.cookie
        );
        request(&self.node.operator, &head, body).finish()
    }

    /// Sends a form of the page, and returns what the next page tells.
    fn act(&self, fields: &str) -> String {
        let sent = self.post("/act", "", &format!("form={}&back=/acts&{fields}", self.form));
        assert_eq!(sent.status, 303, "{}", sent.body);
        let page = self.get(sent.header("location").unwrap()).body;
        let (_, notice) = page.split_once("class=\"notice").unwrap();
        notice.split("</div>").next().unwrap().to_owned()
    }
}

fn accounts(folder: &Folder) -> usize {
    folder.json(&["accounts", "list"])["data"].as_array().unwrap().len()
}

#[test]
fn the_overview_tells_where_the_node_is_reached() {
    let folder = Folder::ready();
    let node = folder.serve_with(&["--gateway", "127.0.0.1:0"]);
    let gateway = folder.json(&["status"])["gateway"].as_str().unwrap().to_owned();
    let page = Visitor::open(&node, &link(&folder, &[])).get("/").body;
    for address in [node.listen.clone(), format!("{gateway}/v1")] {
        assert!(page.contains(&format!("<code>{address}</code>")), "{page}");
    }
}

#[test]
fn only_its_own_forms_are_obeyed() {
    let folder = Folder::ready();
    let node = folder.serve();
    let address = link(&folder, &["operate", "money"]);
    let visitor = Visitor::open(&node, &address);
    let create = |form: &str| format!("form={form}&command=account_create&name=x&back=/");
    let own = create(&visitor.form);
    for (headers, body, status) in [
        ("", create(""), 403),
        ("", create("00000000000000000000000000000000"), 403),
        ("Origin: https://evil.example\r\n", own.clone(), 403),
        ("Origin: null\r\n", own.clone(), 403),
        ("Sec-Fetch-Site: same-site\r\n", own.clone(), 403),
        ("Sec-Fetch-Site: cross-site\r\n", own.clone(), 403),
        ("Host: evil.example\r\n", own.clone(), 400),
    ] {
        let sent = visitor.post("/act", headers, &body);
        assert_eq!(sent.status, status, "{headers:?} {body}");
    }
    let stranger = Visitor { node: &node, cookie: "x=1".into(), form: visitor.form.clone() };
    let sent = stranger.post("/act", "", &own);
    assert_eq!((sent.status, sent.header("location")), (303, Some("/login")));
    assert_eq!(accounts(&folder), 0, "nothing of that was done");
    let path = address.strip_prefix(&node.operator).unwrap();
    for method in ["GET", "POST"] {
        let again = request(&node.operator, &format!("{method} {path} HTTP/1.1\r\n"), "");
        assert_eq!(again.finish().status, 404, "the link was used");
    }
    assert!(visitor.act("command=account_create&name=x").contains("was created"));
    assert_eq!(accounts(&folder), 1);
    let outside = format!("form={}&command=none&back=//evil.example", visitor.form);
    assert_eq!(visitor.post("/act", "", &outside).header("location"), Some("/"));
    visitor.post("/logout", "", &format!("form={}", visitor.form));
    assert_eq!(visitor.get("/accounts").status, 303, "the session is closed");
    assert!(node.terminate().success());
}

#[test]
fn roles_hold_on_the_page_as_elsewhere() {
    let folder = Folder::ready();
    let account = folder.customer(1_000_000).account;
    let node = folder.serve();
    let grant = format!("command=credit_grant&account={account}&bucket=trial&units=1&reference=r");
    let suspend = format!("command=account_suspend&id={account}");
    let reader = Visitor::open(&node, &link(&folder, &["read"]));
    for command in [&grant, &suspend] {
        assert!(reader.act(command).contains("this needs the role"));
    }
    let operator = Visitor::open(&node, &link(&folder, &["operate"]));
    assert!(operator.act(&grant).contains("this needs the role money"));
    assert!(operator.act("command=backup").contains("there is no command"));
    let money = Visitor::open(&node, &link(&folder, &["money"]));
    assert!(money.act(&grant).contains("1 credits were granted"));
    assert!(money.act(&grant).contains("nothing was changed"), "the same grant twice is one");
    let question = |visitor: &Visitor| {
        let id = uuid::Uuid::new_v4();
        let body = json!({ "form": visitor.form, "account": account, "model": node.model,
                           "messages": [{ "role": "user", "content": "hi" }],
                           "key": id, "session": id });
        visitor.post("/chat", "", &body.to_string())
    };
    assert_eq!(question(&reader).status, 403, "a key is made for a question");
    let answer = question(&operator);
    assert!(answer.status == 200 && answer.body.contains("chargedUnits"), "{}", answer.body);
    let before: u64 = 2_000_000;
    let left = folder.json(&["credits", "show", "--account", &account])["trialUnits"].clone();
    assert!(left.as_str().unwrap().parse::<u64>().unwrap() < before, "the account pays: {left}");
    let log = folder.json(&["admin", "log"]);
    let acts: Vec<&Value> = log["data"].as_array().unwrap().iter().collect();
    let granted = acts.iter().find(|act| act["did"]["command"] == "credit_grant").unwrap();
    assert_eq!(granted["by"], "a one-time link (page)");
    assert!(node.terminate().success());
}

#[test]
fn a_revoked_token_closes_its_sessions() {
    let folder = Folder::ready();
    let node = folder.serve();
    let made = folder.json(&["admin", "token", "create", "--name", "ann"]);
    let body = format!("token={}", made["secret"].as_str().unwrap());
    let kind = "Content-Type: application/x-www-form-urlencoded\r\n";
    let login = |body: &str| {
        request(&node.operator, &format!("POST /login HTTP/1.1\r\n{kind}"), body).finish()
    };
    assert_eq!(login("token=x").status, 401);
    let opened = login(&body);
    let cookie = opened.header("set-cookie").unwrap().split(';').next().unwrap().to_owned();
    let visitor = Visitor { node: &node, cookie, form: String::new() };
    for path in ["/accounts", "/models"] {
        let page = visitor.get(path);
        assert_eq!(page.status, 200);
        assert!(
            !page.body.contains("action=\"/act\""),
            "{path} has forms that a reader may not use"
        );
    }
    let mut live = {
        let head = format!("GET /events HTTP/1.1\r\nCookie: {}\r\n", visitor.cookie);
        request(&node.operator, &head, "")
    };
    live.read_until("event: part");
    folder.json(&["admin", "token", "revoke", "ann"]);
    folder.json(&["admin", "token", "create", "--name", "ann"]);
    live.rest();
    assert_eq!(visitor.get("/accounts").status, 303, "another token of the same name");
    assert_eq!(login(&body).status, 401);
    let wrong = &folder.json(&["status"])["wrong_operator_tokens"];
    let counts = ["unknown", "ended", "last_ended"].map(|name| wrong[name].clone());
    assert_eq!(counts, [json!(1), json!(1), json!("ann")]);
    for path in ["/", "/accounts", "/models", "/chat", "/acts", "/events", "/models/events"] {
        let stranger = request(&node.operator, &format!("GET {path} HTTP/1.1\r\n"), "").finish();
        assert_eq!(stranger.header("location"), Some("/login"), "{path}");
    }
    assert!(node.terminate().success());
}

#[test]
fn an_account_shows_its_keys_however_many_others_there_are() {
    let folder = Folder::ready();
    let account = |name: &str| {
        folder.json(&["accounts", "create", "--name", name])["id"].as_str().unwrap().to_owned()
    };
    let (first, last) = (account("first"), account("last"));
    let node = folder.serve();
    let visitor = Visitor::open(&node, &link(&folder, &["operate"]));
    for (account, label, keys) in [(&first, "other", 260), (&last, "the last one", 1)] {
        for _ in 0..keys {
            visitor.post(
                "/act",
                "",
                &format!(
                    "form={}&command=key_create&account={account}&label={label}",
                    visitor.form
                ),
            );
        }
    }
    let plans = visitor.get("/accounts").body;
    assert!(plans.contains("Requests a minute") && plans.contains("<td>120</td>"), "{plans}");
    let page = visitor.get(&format!("/accounts/{last}")).body;
    assert!(page.contains("<td>the last one</td>"), "{page}");
    assert!(node.terminate().success());
}
