import "../vendor/preact.js"
