//! The whole story, with few requests.

use serde_json::Value;

use super::*;

#[test]
fn every_scene_ends_as_it_should_and_says_so() {
    let mut out = Vec::new();
    let failures = play(Format::Json, None, 40, &mut out).expect("the scenes are played");
    assert_eq!(failures, Vec::<String>::new());

    let text = String::from_utf8(out).expect("text");
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("a JSON object a line"))
        .collect();
    let of = |scene: &'static str| lines.iter().filter(move |line| line["scene"] == scene);

    let opened: Vec<_> = of("reuse")
        .map(|line| (line["mode"].as_str(), line["connections_opened"].as_u64()))
        .collect();
    let each = [(Some("pooled"), Some(1)), (Some("fresh"), Some(40))];
    assert_eq!(opened, [each, each].concat());

    assert_eq!(of("stale").count(), 12);
    for line in of("stale") {
        let succeeds =
            line["case"] == "idle" || line["retry_layer"] == true && line["method"] == "GET";
        let expected = if succeeds {
            [Value::from("ok"), Value::Null, Value::Null]
        } else {
            ["error", "connection_closed", "unknown"].map(Value::from)
        };
        let got = [&line["outcome"], &line["kind"], &line["delivery"]];
        assert_eq!(got, expected.each_ref(), "{line}");
    }

    let paid: Vec<_> = of("retry")
        .map(|line| {
            let number = |name: &str| line[name].as_u64().expect("a number");
            let made = number("payments_after") - number("payments_before");
            (made, number("attempts"), line["delivery"].as_str())
        })
        .collect();
    let mut expected = vec![
        (0, 1, Some("unknown")),
        (1, 1, Some("unknown")),
        (1, 2, None),
    ];
    if cfg!(target_os = "linux") {
        expected.extend([(0, 1, Some("not_received")), (1, 2, None)]);
    }
    assert_eq!(paid, expected);
    assert_eq!(lines.len(), 4 + 12 + expected.len());
}
